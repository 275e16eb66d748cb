"""A long session in every k-th column, beside its whole history."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.planner.event_columns import EventColumns
from kvtape.planner.events import Event
from kvtape.report.data.history import history
from kvtape.report.data.rectangles import Rectangles
from kvtape.report.data.thinning import thinned
from kvtape.testing.strategies import event_logs


def grid(shapes: Rectangles, n: int, tape: int) -> np.ndarray:
    found = np.zeros((tape, n), dtype=np.int64)
    for a, b, since, until, state in zip(
        shapes.start, shapes.stop, shapes.since, shapes.until, shapes.state, strict=True
    ):
        found[a:b, since:until] = state
    return found


@settings(max_examples=60)
@given(event_logs(max_events=40), st.integers(1, 9))
def test_a_column_shows_its_last_event_and_the_costliest(events: list[Event], every: int) -> None:
    columns = EventColumns.of(events)
    past, n = history(columns, sink=2, recent=3), len(events)
    elapsed = np.array([(7 * i) % 5 - 1 for i in range(n)])
    thin = thinned(columns, past, np.arange(n) * 10, elapsed, np.arange(n), every)
    tape = int(past.tape_length.max(initial=0))
    last = [min(i + every, n) - 1 for i in range(0, n, every)]
    assert (grid(thin.rectangles, len(thin), tape) == grid(past.rectangles, n, tape)[:, last]).all()
    assert (thin.resident == past.resident[last]).all()
    assert (thin.cold == past.cold[last]).all()
    for column, end in enumerate(last):
        group = range(column * every, end + 1)
        longest = max(group, key=lambda i: (elapsed[i], -i))
        assert thin.text[column] == longest
        assert thin.op[column] == columns.op[longest]
        assert thin.at[column] == 10 * group[0]
        known = [int(elapsed[i]) for i in group if elapsed[i] >= 0]
        assert thin.elapsed[column] == (sum(known) if known else -1)
