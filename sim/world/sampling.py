"""Which conversations of a huge run are written to its log: whole ones, drawn by the hash of their id."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b

from kvtape.sim.errors import SimulationError

__all__ = ["Sample"]


@dataclass(frozen=True, slots=True)
class Sample:
    """A `share` of all conversations, rounded up, or `count` of them: those whose hash under `seed` is smallest.

    Raises SimulationError unless exactly one is given, 0 < share <= 1 and count >= 1.
    """

    share: float | None = None
    count: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.share is None) == (self.count is None):
            raise SimulationError("a sample is a share of the sessions or a number of them; give one of the two")
        if self.share is not None and not 0 < self.share <= 1:
            raise SimulationError(f"a sample of {self.share} of the sessions; give a share above 0, up to 1")
        if self.count is not None and self.count < 1:
            raise SimulationError(f"a sample of {self.count} sessions; give at least 1")
        if not 0 <= self.seed < 2**64:
            raise SimulationError(f"sample seed {self.seed}: give 0 to 2^64 - 1")

    def of(self, names: Sequence[str]) -> frozenset[str]:
        """The drawn ones; adding sessions to a log changes nothing in how the others compare with each other."""
        n = self.count if self.share is None else math.ceil(Fraction(str(self.share)) * len(names))
        return frozenset(sorted(set(names), key=self._place)[:n])

    def _place(self, name: str) -> tuple[bytes, str]:
        salt = self.seed.to_bytes(8, "little")
        return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, salt=salt).digest(), name

    def rule(self, n_written: int, n_all: int) -> str:
        """What a report says of it."""
        return (
            f"of {n_written} of {n_all} conversations, those whose id has the smallest hash (seed {self.seed}); "
            "figures are over all"
        )
