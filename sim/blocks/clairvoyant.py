"""OPT: what knows every later access, and keeps what is used soonest (Belady 1966; Mattson et al. 1970).

A block that is used again is an interval from one use to the next; a cache of `room` blocks can hold any intervals of
which no more than `room` overlap. Giving up the interval that ends last whenever there are too many keeps the most of
them, and what one room keeps, every larger room keeps too. So the rooms are done from the largest down, each over
what the one before kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from kvtape.sim.blocks.accesses import Accesses
from kvtape.sim.blocks.block_trace import Ints
from kvtape.sim.blocks.identity import stable_order

__all__ = ["Intervals", "hits_of", "intervals_held", "intervals_single", "kept"]

_HEAP = 4096
"""A heap of so many is cleared of what has ended."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """Half-open intervals of time [begin, end) that hold `count` blocks each, by begin; ends at equal begins rise.

    `group`: int64 [accesses], the interval that ends with an access, -1 where none does. `rank`: which of the
    interval's blocks it is, the one to keep longest first. `spare`: room that the accesses themselves take.
    """

    begin: Ints
    end: Ints
    count: Ints
    group: Ints
    rank: Ints
    spare: int


def intervals_held(a: Accesses) -> Intervals:
    """Requests as times. A path of blocks that two requests share is one interval; its deepest block goes first."""
    n = a.n_requests
    by_depth = np.empty_like(a.before)
    by_depth[a.starts[a.request] + a.depth] = np.arange(len(a))
    again = by_depth[a.before[by_depth] >= 0]  # by request, then from the first block on
    begun = a.request[a.before[again]]
    order = stable_order(begun)
    ordered = begun[order].astype(np.int64) * n + a.request[again[order]]
    first = np.flatnonzero(np.concatenate([np.ones(1, bool), ordered[1:] != ordered[:-1]])) if len(again) else order
    count = np.diff(np.append(first, len(ordered)))
    group, rank = np.full(len(a), -1, a.before.dtype), np.zeros(len(a), a.before.dtype)
    at = again[order]
    group[at] = np.repeat(np.arange(len(first)), count)
    rank[at] = np.arange(len(ordered)) - np.repeat(first, count)
    return Intervals(ordered[first] // n, ordered[first] % n, count, group, rank, 0)


def intervals_single(a: Accesses, *, bypass: bool) -> Intervals:
    """Accesses as times. Without bypass the block at hand takes one place itself, and its interval begins behind it."""
    again = np.flatnonzero(a.before >= 0)
    order = np.argsort(a.before[again])
    at = again[order]
    group = np.full(len(a), -1, a.before.dtype)
    group[at] = np.arange(len(at))
    shift = 0 if bypass else 1
    zero = np.zeros(len(a), np.int8)
    return Intervals(a.before[at] + shift, at, np.ones(len(at), np.int64), group, zero, shift)


def kept(intervals: Intervals, budgets: Sequence[int]) -> Iterator[tuple[int, Ints]]:
    """(budget, blocks kept of each interval), from the largest budget down. int64 [intervals]."""
    count = intervals.count.copy()
    for budget in sorted(set(budgets), reverse=True):
        room = max(budget - intervals.spare, 0)
        used = np.flatnonzero((count > 0) & (intervals.begin < intervals.end))
        begin, end, held = intervals.begin[used], intervals.end[used], count[used]
        if _peak(begin, end, held) > room:
            count[used] = _greedy(begin, end, held, room)
        yield budget, count.copy()


def hits_of(intervals: Intervals, count: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which accesses find their block, where `count` blocks of each interval are kept. bool [accesses]."""
    if not len(count):
        return np.zeros(len(intervals.group), bool)
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = (intervals.group >= 0) & (
        intervals.rank < count[intervals.group]
    )
    return found


def _peak(begin: Ints, end: Ints, count: Ints) -> int:
    """Most blocks at one time."""
    if not len(begin):
        return 0
    change = np.bincount(begin, count, int(end.max()) + 1) - np.bincount(end, count, int(end.max()) + 1)
    return int(np.cumsum(change).max())


def _greedy(begin: Ints, end: Ints, count: Ints, room: int) -> Ints:
    """What is kept where at most `room` blocks overlap. Of two that end together the one that began later stays."""
    n = len(begin)
    left, ends = count.tolist(), end.tolist()
    ending = stable_order(end).tolist()
    heap: list[int] = []
    alive = done = 0
    most = _HEAP
    for j, now in enumerate(begin.tolist()):
        while ends[ending[done]] <= now:
            alive -= left[ending[done]]
            done += 1
        alive += left[j]
        heappush(heap, -(ends[j] * n + (n - 1 - j)))  # the smallest ends last
        if len(heap) > most:
            heap = [key for key in heap if -key // n > now]
            heapify(heap)
            most = 2 * len(heap) + _HEAP
        while alive > room:
            worst = n - 1 - (-heap[0]) % n
            cut = min(left[worst], alive - room)
            left[worst] -= cut
            alive -= cut
            if left[worst] == 0:
                heappop(heap)
    return np.array(left, np.int64)
