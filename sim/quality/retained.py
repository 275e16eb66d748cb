"""How much of what queries attended to was still there: shares of dense attention mass on resident rows.

A piece is what was measured together: some neighbouring queries, and the mass each chunk of keys got from all of
them. A simulated session computes those queries in one or more operations, each over the rows that were resident
then. Mass is known for a whole chunk and a whole piece only, so where a chunk was resident in part, or for some of
the queries, the share lies in an interval; it is one number where neither happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtape.sim.quality.attention import Piece

__all__ = ["Floats", "Ints", "Seen", "Share", "Weighed", "piece_share", "weigh"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Weighed:
    """The queries at tape positions `[start, stop)`, at least one.

    `starts`, `stops` int64 `[chunks]`: tape positions of key chunks, ascending, without a gap from 0 to `stop`.
    `mass` float64 `[chunks]`: attention that each got from all the queries, mean over layers, any unit.
    """

    start: int
    stop: int
    starts: Ints
    stops: Ints
    mass: Floats

    @property
    def total(self) -> float:
        return float(self.mass.sum())


@dataclass(frozen=True, slots=True)
class Seen:
    """The queries `[start, stop)`, computed in one operation over the rows of `ranges` and their own.

    `ranges` int64 `[n, 2]`: resident tape ranges before them, ascending and disjoint.
    """

    start: int
    stop: int
    ranges: Ints

    @property
    def n_rows(self) -> int:
        """What was resident when the last of them was computed, itself included."""
        return int((self.ranges[:, 1] - self.ranges[:, 0]).sum()) + self.stop - self.start

    def part(self, start: int, stop: int) -> Seen:
        """Of these queries those of `[start, stop)`; for them the ones before `start` are rows like others."""
        first = max(self.start, start)
        own = np.array([[self.start, first]], dtype=np.int64)
        ranges = np.concatenate((self.ranges, own)) if first > self.start else self.ranges
        return Seen(first, min(self.stop, stop), ranges)


@dataclass(frozen=True, slots=True)
class Share:
    """Of the mass of `queries` queries, at least `low` and at most `high` lay on rows that were there; 0 to 1."""

    queries: int
    low: float
    high: float


def weigh(piece: Piece) -> Weighed:
    """A recorded piece, every layer counted alike."""
    return Weighed(piece.start, piece.stop, piece.starts, piece.stops, piece.mass.astype(np.float64).mean(axis=0))


def piece_share(piece: Weighed, seen: Sequence[Seen]) -> Share:
    """The share that the queries of `piece` that `seen` tells of, each once and at least one, found resident.

    Every query has the same whole mass, so those of a part have their part of it. What was lost is at most the mass of
    all chunks that any operation did not see whole, and what each could lose of its own; at least that of the chunks
    that no operation saw anything of, less what queries that are not told of may have paid to them.
    """
    total = piece.total
    n, of = sum(s.stop - s.start for s in seen), piece.stop - piece.start
    if total <= 0.0:
        return Share(n, 1.0, 1.0)
    told = total * n / of
    ever_torn = np.zeros(piece.mass.size, dtype=np.bool_)
    ever_there = np.zeros(piece.mass.size, dtype=np.bool_)
    each = 0.0
    for one in seen:
        whole, there = _covered(piece, one)
        ever_torn |= there < whole
        ever_there |= (there > 0) | (whole == 0)
        each += min(_sum(piece.mass[there < whole]), total * (one.stop - one.start) / of)
    most = min(_sum(piece.mass[ever_torn]), each, told)
    least = min(most, max(0.0, _sum(piece.mass[~ever_there]) - (total - told)))
    return Share(n, 1.0 - most / told, 1.0 - least / told)


def _covered(piece: Weighed, seen: Seen) -> tuple[Ints, Ints]:
    """int64 `[chunks]` each: how many keys of each chunk these queries could have seen, and how many were there."""
    starts, stops = np.minimum(piece.starts, seen.stop), np.minimum(piece.stops, seen.stop)
    own = np.array([[seen.start, seen.stop]], dtype=np.int64)
    ranges = np.concatenate((seen.ranges, own))
    return stops - starts, _count_below(ranges, stops) - _count_below(ranges, starts)


def _count_below(ranges: Ints, at: Ints) -> Ints:
    """int64 like `at`: how many positions of `ranges` `[n, 2]`, ascending and disjoint, lie below each of `at`."""
    index = np.searchsorted(ranges[:, 0], at, side="left")
    lengths = ranges[:, 1] - ranges[:, 0]
    before = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))
    last = np.maximum(index - 1, 0)
    over = np.where(index > 0, np.maximum(0, ranges[last, 1] - at), 0)
    return np.asarray(before[index] - over, dtype=np.int64)


def _sum(values: Floats) -> float:
    return float(values.sum())
