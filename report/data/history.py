"""What every tape position was after every event of a session, as rectangles: tape range x range of events -> state.

    tape ^            the state of a position changes only where an event changes it, so a session of any length
         |   +-----   is a few rectangles an event; drawn at any scale they give exact counts
         | +-+-----
         +-+-------> event

The states come from the one residency fold (`planner.fold_columns`). `recent` and `sink` are resident positions that
the policy names so: the last `recent` of the tape, the first `sink` of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtape.planner.event_columns import OP_CODES, EventColumns
from kvtape.planner.events import Op
from kvtape.planner.fold_columns import folded_runs
from kvtape.planner.ranges import RangeSet
from kvtape.planner.residency_state import ResidencyState
from kvtape.planner.table import Ints
from kvtape.report.data.rectangles import Changes, Rectangles, carried, rectangles

__all__ = ["COLD", "DROPPED", "NOT_YET", "RECENT", "RESIDENT", "SINK", "STATES", "History", "history"]

STATES = ("not yet", "resident", "recent", "sink", "cold", "dropped")
"""Names of the states by their numbers."""

NOT_YET, RESIDENT, RECENT, SINK, COLD, DROPPED = range(6)

_COMPUTED = (OP_CODES[Op.PREFILL], OP_CODES[Op.DECODE])
_MOVING = tuple(OP_CODES[op] for op in (Op.TRUNCATE, Op.RESTORE, Op.ADMIT, Op.RECOMPUTE, Op.TRIM))


@dataclass(frozen=True, slots=True)
class History:
    """`rectangles`: of every state but NOT_YET. int64 `[n]` each, after every event: `tape_length`, `resident`,
    `cold`, in tokens. `final`: the state after the last event."""

    rectangles: Rectangles
    tape_length: Ints
    resident: Ints
    cold: Ints
    final: ResidencyState

    def __len__(self) -> int:
        return len(self.tape_length)

    @property
    def longest(self) -> int:
        """The most positions that the tape ever had."""
        return int(self.tape_length.max(initial=0))

    @property
    def fullest(self) -> int:
        """The most tokens that were ever resident at once."""
        return int(self.resident.max(initial=0))


def history(columns: EventColumns, *, sink: int = 0, recent: int = 0) -> History:
    """The history of a session whose rows begin at seq 0. `sink`, `recent`: the policy's spans, in tokens.

    Raises IllegalEvent as the fold does; IllegalEvent also for an event behind a `lost` one.
    """
    computed = np.isin(columns.op, _COMPUTED)
    evicted = (columns.op == OP_CODES[Op.EVICT]) & columns.plain
    moving = np.isin(columns.op, _MOVING) | ((columns.op == OP_CODES[Op.EVICT]) & ~columns.plain)
    lengths = columns.stop - columns.start
    tape = np.where(computed, columns.stop, -1)
    resident = np.where(computed, lengths, 0) - np.where(evicted, lengths, 0)
    cold = np.zeros(len(columns), dtype=np.int64)
    found = Changes()
    before, held = ResidencyState(), _NOTHING
    for first, _, after in folded_runs(columns):
        if moving[first]:  # never folded as one with others
            was = _held(before, held)
            held = _held(after, was)
            tape[first] = after.tape_length
            resident[first] = after.resident_tokens - before.resident_tokens
            cold[first] = held.cold.n_tokens - was.cold.n_tokens
            _differences(found, first, was, held)
        before = after
    for rows, state in ((np.flatnonzero(computed), RESIDENT), (np.flatnonzero(evicted), DROPPED)):
        found.add_many(columns.start[rows], columns.stop[rows], rows, state)
    tape_length = carried(tape, np.arange(len(tape)) == 0)
    shapes = rectangles(found, _recent_changes(tape_length, recent), len(columns), sink, (RESIDENT, RECENT, SINK))
    return History(shapes, tape_length, np.cumsum(resident), np.cumsum(cold), before)


@dataclass(frozen=True, slots=True)
class _Held:
    """The sets of a state."""

    state: ResidencyState
    resident: RangeSet
    cold: RangeSet
    dropped: RangeSet


_NOTHING = _Held(ResidencyState(), RangeSet(), RangeSet(), RangeSet())


def _held(state: ResidencyState, last: _Held) -> _Held:
    """The sets of a state; what it has in common with the last one is not built again, which is most of the time."""
    if state is last.state:
        return last
    resident = last.resident if state.layout is last.state.layout else state.resident
    cold = last.cold if state.cold is last.state.cold else state.cold_ranges
    return _Held(state, resident, cold, RangeSet([(0, state.tape_length)]) - resident - cold)


def _differences(found: Changes, row: int, before: _Held, after: _Held) -> None:
    """What one event changed: positions that are in a set after it and were not before."""
    sets = (
        (RESIDENT, before.resident, after.resident),
        (COLD, before.cold, after.cold),
        (DROPPED, before.dropped, after.dropped),
    )
    for state, was, now in sets:
        if now is not was:
            for start, stop in (now - was).as_pairs():
                found.add(start, stop, row, state)
    if after.state.tape_length < before.state.tape_length:
        found.add(after.state.tape_length, before.state.tape_length, row, NOT_YET)


def _recent_changes(tape_length: Ints, recent: int) -> Changes:
    """When positions enter (1) and leave (0) the last `recent` of the tape."""
    found = Changes()
    old = np.concatenate(([0], tape_length[:-1]))
    rows = np.flatnonzero(tape_length != old)
    was, now = old[rows], tape_length[rows]
    low_was, low_now = np.maximum(was - recent, 0), np.maximum(now - recent, 0)
    found.add_many(low_was, np.minimum(low_now, was), rows, 0)
    found.add_many(np.maximum(low_now, was), now, rows, 1)
    found.add_many(np.maximum(now, low_was), was, rows, 0)
    found.add_many(low_now, np.minimum(low_was, now), rows, 1)
    return found
