"""What one call computed in every layer, kept for whoever asked: the state dump and its mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtape.backends.reference.engines.engine import StateMask
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.dispatch import LayerRows, NewRows, Seen
from kvtape.backends.reference.model.steps import Positions

__all__ = ["Dumping", "StepState", "joined"]


@dataclass(frozen=True, slots=True)
class StepState:
    """Of the rows of one call: `h` `[n_layer, n, n_embd]`, the input of each layer; `keys`, `values`
    `[n_layer, n, n_head_kv, head_dim]`, keys rotated, None under H_ONLY.
    """

    positions: Positions
    h: Floats
    keys: Floats | None
    values: Floats | None


class Dumping:
    """An engine's rows, with copies made of what passes as `mask` says."""

    def __init__(self, rows: LayerRows, mask: StateMask) -> None:
        self._rows, self._mask = rows, mask
        self._passed: list[NewRows] = []

    def seen(self, layer: int, new: NewRows) -> Seen:
        if self._mask is not StateMask.NONE:
            self._passed.append(new)
        return self._rows.seen(layer, new)

    def state(self, positions: Positions) -> StepState | None:
        """None under NONE."""
        if self._mask is StateMask.NONE:
            return None
        full = self._mask is StateMask.FULL
        return StepState(
            positions=positions,
            h=np.stack([new.x for new in self._passed]),
            keys=np.stack([new.keys for new in self._passed]) if full else None,
            values=np.stack([new.values for new in self._passed]) if full else None,
        )


def joined(states: Sequence[StepState]) -> StepState | None:
    """The states of a call that ran in several parts, as one; None for no part."""
    if len(states) < 2:
        return states[0] if states else None
    keys = [state.keys for state in states if state.keys is not None]
    values = [state.values for state in states if state.values is not None]
    return StepState(
        positions=np.concatenate([state.positions for state in states]),
        h=np.concatenate([state.h for state in states], axis=1),
        keys=np.concatenate(keys, axis=1) if keys else None,
        values=np.concatenate(values, axis=1) if values else None,
    )
