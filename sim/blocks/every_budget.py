"""OPT at every budget: the least room that keeps each interval.

What a room keeps, every larger room keeps too. So the rooms are halved: what the middle room keeps needs no more than
that, and is all that smaller rooms have to choose from; the rest needs more, and gets what the kept ones leave free
at each time. Every interval goes down one branch, so the whole costs a pass for each halving.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from kvtape.sim.blocks.block_trace import Ints
from kvtape.sim.blocks.clairvoyant import Intervals

__all__ = ["least_rooms"]


@dataclass(frozen=True, slots=True)
class _Part:
    """Blocks that `high` rooms keep and `low` rooms do not: `count` of each interval, from rank `first` on.

    `times`: where any of them begins or ends; `taken`: the most blocks that `low` rooms keep between two of those.
    """

    low: int
    high: int
    group: Ints
    begin: Ints
    end: Ints
    first: Ints
    count: Ints
    times: Ints
    taken: Ints


def least_rooms(intervals: Intervals) -> Ints:
    """For each access the least room whose OPT keeps its block until then; -1 where none does. int64 [accesses]."""
    used = np.flatnonzero((intervals.begin < intervals.end) & (intervals.count > 0))
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(intervals.count)])
    rooms = np.zeros(int(starts[-1]), np.int64)
    if len(used):
        begin, end, count = intervals.begin[used], intervals.end[used], intervals.count[used]
        times = np.unique(np.concatenate([begin, end]))
        nothing = np.zeros(len(times), np.int64)
        high = int(_occupied(times, begin, end, count).max())
        parts = [_Part(0, high, used, begin, end, np.zeros(len(used), np.int64), count, times, nothing)]
        while parts:
            part = parts.pop()
            if part.high - part.low == 1:
                at = np.repeat(starts[part.group] + part.first - (np.cumsum(part.count) - part.count), part.count)
                rooms[at + np.arange(len(at))] = part.high
            else:
                parts += _halves(part)
    found = np.full(len(intervals.group), -1, np.int64)
    ends = intervals.group >= 0
    found[ends] = rooms[starts[intervals.group[ends]] + intervals.rank[ends]]
    return found


def _halves(part: _Part) -> list[_Part]:
    middle = (part.low + part.high) // 2
    kept = _kept(part, middle)
    rest = part.count - kept
    held = part.taken + _occupied(part.times, part.begin, part.end, kept)
    halves = [_narrowed(part, part.low, middle, part.first, kept, part.taken)]
    halves.append(_narrowed(part, middle, part.high, part.first + kept, rest, held))
    return [half for half in halves if len(half.group)]


def _narrowed(part: _Part, low: int, high: int, first: Ints, count: Ints, taken: Ints) -> _Part:
    """The intervals of which something is left, over their own times."""
    some = np.flatnonzero(count)
    begin, end = part.begin[some], part.end[some]
    times = np.unique(np.concatenate([begin, end]))
    if len(times):
        taken = np.maximum.reduceat(taken, np.searchsorted(part.times, times))
    return _Part(low, high, part.group[some], begin, end, first[some], count[some], times, taken)


def _occupied(times: Ints, begin: Ints, end: Ints, count: Ints) -> Ints:
    """Blocks between each of `times` and the next."""
    change = np.zeros(len(times), np.int64)
    np.add.at(change, np.searchsorted(times, begin), count)
    np.subtract.at(change, np.searchsorted(times, end), count)
    return np.cumsum(change)


def _kept(part: _Part, room: int) -> Ints:
    """What is kept of each interval where `room` less `taken` is free: what ends last goes first, as in `kept`."""
    n = len(part.group)
    free = (room - part.taken).tolist()
    begins = np.searchsorted(part.times, part.begin).tolist()
    ends = np.searchsorted(part.times, part.end).tolist()
    ending = np.argsort(part.end, kind="stable").tolist()
    keys = (-(part.end * n + (n - 1 - np.arange(n)))).tolist()
    left = part.count.tolist()
    heap: list[int] = []
    alive = done = begun = 0
    for now, most in enumerate(free):
        while done < n and ends[ending[done]] <= now:
            alive -= left[ending[done]]
            done += 1
        while begun < n and begins[begun] == now:
            alive += left[begun]
            heappush(heap, keys[begun])
            begun += 1
        while alive > most:
            worst = n - 1 - (-heap[0]) % n
            cut = min(left[worst], alive - most)
            left[worst] -= cut
            alive -= cut
            if left[worst] == 0:
                heappop(heap)
    return np.array(left, np.int64)
