"""Where resident tokens stand: tape positions mapped to cache positions, as segments in cache order.

    tape:   0 1 2 3 4 5 6 7        what the session was fed; a position never changes its name
    cache:  0 1 - - 4 5 6 7        gap: rows [2,4) removed, the others keep their positions
    cache:  0 1     2 3 4 5        rebased: the tail was rotated by -2

A layout is a tuple of `Segment`; each is contiguous in the tape and in the cache. It is kept normalised: in
cache order, without overlap, neighbours merged when they are contiguous in both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from kvtape.planner.ranges import RangeSet, digest_u64s

__all__ = [
    "Layout",
    "Place",
    "Segment",
    "append",
    "cut",
    "find_place",
    "layout_digest",
    "next_cache_position",
    "normalise",
    "rank_layout",
    "remove",
    "resident_ranges",
    "rows_between",
    "run_start",
    "shift",
]


@dataclass(frozen=True, slots=True)
class Segment:
    """`length` tokens from tape position `tape_start`, at cache positions from `cache_start`."""

    tape_start: int
    length: int
    cache_start: int

    @property
    def tape_stop(self) -> int:
        return self.tape_start + self.length

    @property
    def cache_stop(self) -> int:
        return self.cache_start + self.length


Layout = tuple[Segment, ...]


def normalise(segments: Iterable[Segment]) -> Layout:
    """Cache order, merged. Raises ValueError when two segments overlap in the tape or in the cache."""
    merged: list[Segment] = []
    for seg in sorted(segments, key=lambda s: s.cache_start):
        if seg.length == 0:
            continue
        if seg.length < 0 or seg.tape_start < 0 or seg.cache_start < 0:
            raise ValueError(f"bad segment {seg}")
        if merged:
            last = merged[-1]
            if seg.cache_start < last.cache_stop:
                raise ValueError(f"{seg} overlaps {last} in the cache")
            if seg.cache_start == last.cache_stop and seg.tape_start == last.tape_stop:
                merged[-1] = Segment(last.tape_start, last.length + seg.length, last.cache_start)
                continue
        merged.append(seg)
    by_tape = sorted(merged, key=lambda s: s.tape_start)
    for left, right in pairwise(by_tape):
        if right.tape_start < left.tape_stop:
            raise ValueError(f"{right} overlaps {left} in the tape")
    return tuple(merged)


def resident_ranges(layout: Layout) -> RangeSet:
    """The resident tape positions."""
    return RangeSet((s.tape_start, s.tape_stop) for s in layout)


def layout_digest(layout: Layout) -> int:
    """`digest_u64s` over (tape_start, length, cache_start) of the segments in cache order."""
    return digest_u64s(v for s in layout for v in (s.tape_start, s.length, s.cache_start))


def next_cache_position(layout: Layout) -> int:
    """The cache position the next token gets: one past the largest in use, 0 in an empty cache."""
    return layout[-1].cache_stop if layout else 0


def rows_between(layout: Layout, cache_start: int, cache_stop: int) -> int:
    """How many rows stand at cache positions `[cache_start, cache_stop)`."""
    return sum(max(0, min(s.cache_stop, cache_stop) - max(s.cache_start, cache_start)) for s in layout)


def run_start(layout: Layout, start: int, stop: int) -> int | None:
    """The cache position of the tape range `[start, stop)`; None unless it is one resident run, and not empty."""
    for s in layout:
        if s.tape_start <= start < stop <= s.tape_stop:
            return s.cache_start + start - s.tape_start
    return None


def append(layout: Layout, tape_start: int, n_tokens: int, cache_start: int) -> Layout:
    """The layout with `n_tokens` more rows. Raises ValueError on an overlap."""
    new = Segment(tape_start, n_tokens, cache_start)
    last = layout[-1] if layout else None
    if last is None or n_tokens <= 0 or cache_start < last.cache_stop:
        return normalise((*layout, new))
    if any(s.tape_stop > tape_start for s in layout):
        return normalise((*layout, new))
    # Behind every row in the tape and in the cache, as nearly all tokens come: nothing to sort.
    if last.cache_stop == cache_start and last.tape_stop == tape_start:
        return (*layout[:-1], Segment(last.tape_start, last.length + n_tokens, last.cache_start))
    return (*layout, new)


def remove(layout: Layout, start: int, stop: int) -> Layout:
    """The layout without the tape positions `[start, stop)`; the others keep their cache positions."""
    kept: list[Segment] = []
    for s in layout:
        left = min(s.tape_stop, start) - s.tape_start
        if left > 0:
            kept.append(Segment(s.tape_start, left, s.cache_start))
        skip = max(0, stop - s.tape_start)
        if skip < s.length:
            kept.append(Segment(s.tape_start + skip, s.length - skip, s.cache_start + skip))
    return normalise(kept) if start < stop else layout


def cut(layout: Layout, tape_stop: int) -> Layout:
    """The layout without tape positions at or past `tape_stop`."""
    end = max((s.tape_stop for s in layout), default=0)
    return remove(layout, tape_stop, max(end, tape_stop))


def shift(layout: Layout, cache_start: int, cache_stop: int, delta: int) -> Layout:
    """The layout with the rows at cache positions `[cache_start, cache_stop)` moved by `delta`.

    Raises ValueError when a moved row would fall below 0 or onto a row that stays.
    """
    moved: list[Segment] = []
    for s in layout:
        a, b = max(s.cache_start, cache_start), min(s.cache_stop, cache_stop)
        if a >= b:
            moved.append(s)
            continue
        if s.cache_start < a:
            moved.append(Segment(s.tape_start, a - s.cache_start, s.cache_start))
        moved.append(Segment(s.tape_start + a - s.cache_start, b - a, a + delta))
        if b < s.cache_stop:
            moved.append(Segment(s.tape_start + b - s.cache_start, s.cache_stop - b, b))
    return normalise(moved)


def rank_layout(ranges: RangeSet) -> Layout:
    """The layout of a fresh prefill of `ranges`: tape order, contiguous from cache position 0."""
    out: list[Segment] = []
    at = 0
    for r in ranges:
        out.append(Segment(r.start, len(r), at))
        at += len(r)
    return normalise(out)


@dataclass(frozen=True, slots=True)
class Place:
    """Where rows can go in tape order: first cache position, and the shift that makes room there.

    With `delta` > 0 the rows at cache positions `[shift_from, shift_stop)` must move by `delta` first.
    """

    cache_start: int
    shift_from: int
    shift_stop: int
    delta: int


def find_place(layout: Layout, start: int, stop: int, preferred: int | None = None) -> Place:
    """The in-place position of the absent tape range `[start, stop)`, relative order restored.

    The rows go right before the first row, in cache order, that is later in the tape. A hole of the cache is used
    where it is: at `preferred` (where the rows were) if that is free, else as far before the later row as the tape
    says. A hole that is too small is widened by shifting the rows behind it.
    """
    n = stop - start
    behind = next((i for i, s in enumerate(layout) if s.tape_start >= stop), None)
    if behind is None:
        end = next_cache_position(layout)
        at = max(end, preferred) if preferred is not None else end
        return Place(at, at, at, 0)
    floor = layout[behind - 1].cache_stop if behind else 0
    right = layout[behind]
    ceiling = right.cache_start - n
    if ceiling < floor:
        return Place(floor, right.cache_start, next_cache_position(layout), floor - ceiling)
    if preferred is not None and floor <= preferred <= ceiling:
        return Place(preferred, 0, 0, 0)
    natural = right.cache_start - (right.tape_start - start)
    return Place(min(max(natural, floor), ceiling), 0, 0, 0)
