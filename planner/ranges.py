"""Half-open integer ranges and normalised disjoint sets of them.

Everything about residency is a set of tape positions, and a set of tape positions is a `RangeSet`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["Range", "RangeSet", "digest_u64s"]


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """`[start, stop)` in tokens, `0 <= start <= stop`; empty is legal as a value.

    Raises ValueError for a negative start or a stop before the start.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"bad range [{self.start}, {self.stop}): need 0 <= start <= stop")

    def __len__(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: Range) -> bool:
        """Strict half-open overlap: ranges that only touch do not, and an empty range never does."""
        return max(self.start, other.start) < min(self.stop, other.stop)

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


def digest_u64s(values: Iterable[int]) -> int:
    """blake2b with 8 bytes of output over the little-endian u64 `values`, read as a little-endian u64."""
    numbers = list(values)
    packed = struct.pack(f"<{len(numbers)}Q", *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


class RangeSet:
    """An immutable set of positions, kept as sorted, disjoint, non-touching, non-empty ranges.

    Raises ValueError for a pair that is no `Range`.
    """

    __slots__ = ("_ranges",)
    _ranges: tuple[Range, ...]

    def __init__(self, ranges: Iterable[Range | tuple[int, int]] = ()) -> None:
        pairs = sorted((r.start, r.stop) if isinstance(r, Range) else (r[0], r[1]) for r in ranges)
        merged: list[Range] = []
        for start, stop in pairs:
            if not 0 <= start < stop:
                Range(start, stop)  # refuses a bad pair; what is left is empty
                continue
            if merged and start <= merged[-1].stop:
                if stop > merged[-1].stop:
                    merged[-1] = Range(merged[-1].start, stop)
            else:
                merged.append(Range(start, stop))
        self._ranges = tuple(merged)

    @property
    def ranges(self) -> tuple[Range, ...]:
        return self._ranges

    @property
    def n_tokens(self) -> int:
        """How many positions the set holds."""
        return sum(len(r) for r in self._ranges)

    def __iter__(self) -> Iterator[Range]:
        return iter(self._ranges)

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def __eq__(self, other: object) -> bool:
        return self._ranges == other._ranges if isinstance(other, RangeSet) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._ranges)

    def __contains__(self, position: int) -> bool:
        return any(r.start <= position < r.stop for r in self._ranges)

    def __or__(self, other: RangeSet) -> RangeSet:
        return RangeSet((*self._ranges, *other._ranges))

    def __and__(self, other: RangeSet) -> RangeSet:
        out: list[Range] = []
        mine, theirs = self._ranges, other._ranges
        i = j = 0
        while i < len(mine) and j < len(theirs):
            start, stop = max(mine[i].start, theirs[j].start), min(mine[i].stop, theirs[j].stop)
            if start < stop:
                out.append(Range(start, stop))
            if mine[i].stop < theirs[j].stop:
                i += 1
            else:
                j += 1
        return _normal(out)

    def __sub__(self, other: RangeSet) -> RangeSet:
        out: list[Range] = []
        j = 0
        theirs = other._ranges
        for r in self._ranges:
            start = r.start
            while j < len(theirs) and theirs[j].stop <= start:
                j += 1
            k = j
            while k < len(theirs) and theirs[k].start < r.stop:
                if start < theirs[k].start:
                    out.append(Range(start, theirs[k].start))
                start = max(start, theirs[k].stop)
                k += 1
            if start < r.stop:
                out.append(Range(start, r.stop))
        return _normal(out)

    def issubset(self, other: RangeSet) -> bool:
        return not self - other

    def digest(self) -> int:
        """The `resident_digest` of a log: `digest_u64s` over start, stop pairs in order."""
        return digest_u64s(v for r in self._ranges for v in (r.start, r.stop))

    def as_pairs(self) -> list[tuple[int, int]]:
        return [(r.start, r.stop) for r in self._ranges]

    def __repr__(self) -> str:
        return "RangeSet(" + " ".join(str(r) for r in self._ranges) + ")"


def _normal(ranges: Iterable[Range]) -> RangeSet:
    """The set of ranges that are sorted, disjoint, non-touching and non-empty already, as what is left of such is."""
    made = object.__new__(RangeSet)
    made._ranges = tuple(ranges)
    return made
