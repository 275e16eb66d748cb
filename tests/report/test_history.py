"""The rectangles of a session's history beside the fold, position by position and event by event."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.planner.event_columns import EventColumns
from kvtape.planner.events import Event
from kvtape.planner.residency import apply
from kvtape.planner.residency_state import ResidencyState
from kvtape.report.data.history import COLD, NOT_YET, RECENT, RESIDENT, SINK, STATES, history
from kvtape.testing.strategies import event_logs
from support.read_cells import folded_state


def folded(events: list[Event], sink: int, recent: int) -> np.ndarray:
    """State of every tape position (rows) after every event (columns), from the fold alone."""
    states, state = [], ResidencyState()
    for event in events:
        state = apply(state, event)
        states.append(state)
    positions = range(max(s.tape_length for s in states) + 1)
    return np.array([[STATES.index(folded_state(s, at, sink, recent)) for s in states] for at in positions])


@settings(max_examples=120)
@given(event_logs(max_events=40), st.integers(0, 6), st.integers(0, 12))
def test_rectangles_are_the_fold(events: list[Event], sink: int, recent: int) -> None:
    expected = folded(events, sink, recent)
    found = history(EventColumns.of(events), sink=sink, recent=recent)
    grid = np.full_like(expected, NOT_YET)
    r = found.rectangles
    for start, stop, since, until, state in zip(r.start, r.stop, r.since, r.until, r.state, strict=True):
        assert (grid[start:stop, since:until] == NOT_YET).all()  # no two overlap
        assert start < stop
        assert since < until
        grid[start:stop, since:until] = state
    assert (grid == expected).all()
    assert (found.resident == (np.isin(expected, (RESIDENT, RECENT, SINK))).sum(axis=0)).all()
    assert (found.cold == (expected == COLD).sum(axis=0)).all()
    assert (found.tape_length == (expected != NOT_YET).sum(axis=0)).all()
