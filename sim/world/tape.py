"""A session's tape while its log is read: tokens, and which segment each stretch of them belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvtape.planner.blocks import CacheClass
from kvtape.planner.rows import BlockRow
from kvtape.sim.world.script import Stretch

__all__ = ["Tape"]

_Border = tuple[int, str, CacheClass]


class Tape:
    """Positions with their token; `borders` are the first positions of segments, ascending."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.borders: list[_Border] = []

    def put(self, start: int, tokens: Sequence[int]) -> None:
        """`tokens` from position `start` on; what stood there and behind is gone."""
        self.tokens[start:] = tokens

    def segment(self, start: int, kind: str, cache_class: CacheClass) -> None:
        """From `start` on another segment."""
        self.borders = [b for b in self.borders if b[0] < start]
        self.borders.append((start, kind, cache_class))

    def lay(self, start: int, rows: Sequence[BlockRow], block: int) -> None:
        """The segments that blocks recorded for one operation, which began at `start`, imply.

        A new segment begins where the kind changes, or where a block begins off the grid of its segment.
        """
        covered, origin = start, None
        last: tuple[str, str] | None = None
        for row in sorted(rows, key=lambda r: (r.seq, r.start)):
            if row.stop <= covered:
                continue
            begins = max(row.start, covered)
            kind = (row.segment, row.cache_class)
            off_grid = origin is not None and row.start >= covered and (row.start - origin) % block != 0
            if origin is None or kind != last or off_grid:
                self.segment(begins, row.segment, CacheClass(row.cache_class))
                origin, last = begins, kind
            covered = row.stop

    def cut(self, stop: int) -> None:
        del self.tokens[stop:]
        self.borders = [b for b in self.borders if b[0] < stop]

    def stretches(self, start: int, stop: int) -> tuple[Stretch, ...]:
        """`[start, stop)` by segment; what no block row names is a user's."""
        marks = self.borders if self.borders and self.borders[0][0] == 0 else [_user(0), *self.borders]
        ends = [*marks, (stop, "", CacheClass.VOLATILE)]
        out: list[Stretch] = []
        for (a, kind, cache_class), (b, _, _) in pairwise(ends):
            a, b = max(a, start), min(b, stop)
            if a < b:
                out.append(Stretch(kind, cache_class, tuple(self.tokens[a:b])))
        return tuple(out)

    def copy(self) -> Tape:
        other = Tape()
        other.tokens, other.borders = list(self.tokens), list(self.borders)
        return other


def _user(at: int) -> _Border:
    return at, "user", CacheClass.VOLATILE
