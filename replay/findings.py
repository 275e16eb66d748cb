"""What a comparison found wrong, as data, and the tolerances it was held to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvtape.backends.rounding import PACKED_TYPES, ROUNDING
from kvtape.planner.ranges import RangeSet
from kvtape.replay.numbers import Agreement

__all__ = ["Finding", "Gate", "Pairs", "Storage", "Tolerances", "as_pairs"]

Storage = Literal["f32", "half", "quantised"]
"""How weights are stored; `half` is f16 or bf16."""

_IDENTITY: dict[Storage, float] = {"f32": 1e-3, "half": 1e-2, "quantised": 0.05}

_KEPT = {"f32": (1e-3, 1e-3), "f64": (1e-3, 1e-3), "u8": (3e-2, 5e-2)}
"""What keeping a key adds, to it alone and to two of one key at two positions: on SmolLM2 in u8 0.012 and 0.016."""

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """`what` is wrong in one line; `expected` and `found` are half-open ranges, where ranges say it."""

    what: str
    expected: Pairs | None = None
    found: Pairs | None = None


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Relative distances (Euclidean, of one row over all its heads) that still count as the same row.

    `identity`: a stored layer-0 key, turned back, to the key computed from the weights. `moved_key`: a key after a
    shift to the same key before it, turned by the shift's delta. `rounding`: what storing a packed key adds to the
    first, and adds again each time it is moved.
    """

    identity: float
    moved_key: float
    rounding: float = 0.0

    @classmethod
    def of(cls, *, weights: Storage, kv_type_k: str) -> Tolerances:
        """Engines round activations to the precision of the weights that they multiply: to 8 bits against quantised
        ones, which alone moves layer-0 keys by 0.01, to 11 or 8 bits of mantissa against f16 and bf16."""
        identity, moved_key = _KEPT.get(kv_type_k, (1e-2, 2e-2))
        rounding = ROUNDING[kv_type_k] if kv_type_k in PACKED_TYPES else 0.0
        return cls(max(_IDENTITY[weights], identity), max(moved_key, 1.2 * rounding), rounding)

    def identity_after(self, moves: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """`identity` of rows that were moved so many times. Roundings are independent: they add up as squares do."""
        spread: npt.NDArray[np.float64] = np.sqrt(1.0 + moves)
        return self.identity + self.rounding * spread


@dataclass(frozen=True, slots=True)
class Gate:
    """When a session's logits count as right: limits in nats and as a share, beside what two right evaluations
    differ by. Each session is judged by itself: a long one that is right does not hide a short one that is wrong.

    On some texts two right evaluations differ by more than the limits. There they follow from what rounding alone does
    to the reference, at the same checkpoints of the same lineage: mean KL is at most `rounding_times` as large, and
    top-1 not below by more than `rounding_deviations` standard deviations of a share of so many checkpoints.
    """

    mean_kl: float = 0.01
    top1: float = 0.9
    noise_floor_mean_kl: float = 0.003
    rounding_times: float = 3.0
    rounding_deviations: float = 3.0

    def limits(self, checkpoints: int, rounding: Agreement | None = None) -> tuple[float, float]:
        """The largest mean KL and the least top-1 that pass over so many checkpoints.

        `rounding`: of the reference and the reference rounded, where that is known.
        """
        if rounding is None or not math.isfinite(rounding.mean_kl):
            return self.mean_kl, self.top1
        # Laplace's rule: a share that was always 1 is not known to be 1.
        share = (rounding.top1 * rounding.checkpoints + 1) / (rounding.checkpoints + 2)
        top1 = share - self.rounding_deviations * math.sqrt(share * (1 - share) / checkpoints)
        return max(self.mean_kl, self.rounding_times * rounding.mean_kl), min(self.top1, top1)

    def passes(self, agreement: Agreement | None, rounding: Agreement | None = None) -> bool:
        """Whether a session passes; one without checkpoints has nothing to fail by."""
        if agreement is None:
            return True
        mean_kl, top1 = self.limits(agreement.checkpoints, rounding)
        return agreement.mean_kl <= mean_kl and agreement.top1 >= top1


def as_pairs(positions: Iterable[int] | npt.NDArray[np.int64]) -> Pairs:
    """Positions, in any order, as half-open ranges."""
    return tuple(RangeSet((int(p), int(p) + 1) for p in positions).as_pairs())
