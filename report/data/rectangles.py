"""From changes of tape ranges, event by event, to the rectangles in which nothing changes. Knows numbers only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtape.planner.table import Bools, Ints

__all__ = ["Changes", "Rectangles", "carried", "rectangles"]


@dataclass(frozen=True, slots=True)
class Rectangles:
    """int64 `[n]` each, ordered by `since`, `start`: tape positions `[start, stop)` were in `state` after the events
    `since` to `until - 1`. No two overlap."""

    start: Ints
    stop: Ints
    since: Ints
    until: Ints
    state: Ints

    def __len__(self) -> int:
        return len(self.start)


class Changes:
    """Tape ranges and what they become at an event. Of changes at one event the one added last counts."""

    def __init__(self) -> None:
        self._parts: list[tuple[Ints, Ints, Ints, Ints]] = []
        self._single: list[tuple[int, int, int, int]] = []

    def add(self, start: int, stop: int, event: int, value: int) -> None:
        self._single.append((start, stop, event, value))

    def add_many(self, start: Ints, stop: Ints, events: Ints, value: int) -> None:
        """Empty ranges, also those that end before they start, are no changes."""
        some = start < stop
        n = int(some.sum())
        self._parts.append((start[some], stop[some], events[some], np.full(n, value, dtype=np.int64)))

    def arrays(self) -> tuple[Ints, Ints, Ints, Ints]:
        """start, stop, event, value."""
        single = np.array(self._single, dtype=np.int64).reshape(-1, 4)
        parts = [*self._parts, (single[:, 0], single[:, 1], single[:, 2], single[:, 3])]
        start, stop, event, value = (np.concatenate([part[i] for part in parts]) for i in range(4))
        return start, stop, event, value


def rectangles(
    states: Changes, recents: Changes, n_events: int, sink: int, resident: tuple[int, int, int]
) -> Rectangles:
    """The rectangles of all states but 0. `recents` says which positions count as recent.

    `resident`: the numbers of resident, recent and sink; positions below `sink` that are resident are sink.
    """
    base_changes, recent_changes = states.arrays(), recents.arrays()
    start, stop, event, value = (np.concatenate(pair) for pair in zip(base_changes, recent_changes, strict=True))
    layer = np.arange(len(start)) >= len(base_changes[0])
    cuts = np.unique(np.concatenate((start, stop, [sink])))
    cell, of = _spread(np.searchsorted(cuts, start), np.searchsorted(cuts, stop))
    order = np.lexsort((of, event[of], cell))
    cell, of = cell[order], of[order]
    opens = _starts(cell)
    base = carried(np.where(layer[of], -1, value[of]), opens)
    recent = carried(np.where(layer[of], value[of], -1), opens)
    plain, newest, first = resident
    inside = np.where(cuts[cell] < sink, first, np.where(recent == 1, newest, plain))
    state = np.where(base == plain, inside, base)
    # Of one event the last change stands; what stays the same goes on.
    last = np.concatenate((opens[1:] | (event[of][1:] != event[of][:-1]), [True]))[: len(cell)]
    cell, at, state = cell[last], event[of][last], state[last]
    fresh = _starts(cell)
    fresh[1:] |= state[1:] != state[:-1]
    cell, at, state = cell[fresh], at[fresh], state[fresh]
    until = np.where(
        np.concatenate((_starts(cell)[1:], [True]))[: len(cell)], n_events, np.append(at[1:], n_events)[: len(at)]
    )
    return _joined(cuts, cell, at, until, state)


def carried(values: Ints, opens: Bools) -> Ints:
    """Every -1 as the value before it, since the last row that `opens`; 0 where there is none."""
    rows = np.arange(len(values))
    begin = np.maximum.accumulate(np.where(opens, rows, 0))
    known = np.maximum.accumulate(np.where(values >= 0, rows, -1))
    return np.asarray(np.where(known >= begin, values[known], 0))


def _spread(first: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Every number of the ranges `[first, stop)`, and of which range it is."""
    n = stop - first
    of = np.repeat(np.arange(len(first)), n)
    return np.arange(len(of)) - np.repeat(np.cumsum(n) - n, n) + first[of], of


def _starts(cell: Ints) -> Bools:
    """Whether a row is the first of its cell."""
    first = np.ones(len(cell), dtype=np.bool_)
    first[1:] = cell[1:] != cell[:-1]
    return first


def _joined(cuts: Ints, cell: Ints, since: Ints, until: Ints, state: Ints) -> Rectangles:
    """Cells side by side that share events and state are one rectangle."""
    some = state > 0
    cell, since, until, state = cell[some], since[some], until[some], state[some]
    order = np.lexsort((cell, state, until, since))
    cell, since, until, state = cell[order], since[order], until[order], state[order]
    begins = np.ones(len(cell), dtype=np.bool_)
    begins[1:] = (np.diff(cell) != 1) | (np.diff(since) != 0) | (np.diff(until) != 0) | (np.diff(state) != 0)
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(cell))[: len(first)] - 1
    start, stop = cuts[cell[first]], cuts[cell[last] + 1] if len(cell) else cuts[:0]
    order = np.lexsort((start, since[first]))
    return Rectangles(start[order], stop[order], since[first][order], until[first][order], state[first][order])
