"""A session's events as the page holds them: all of them, or of every k one column."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtape.planner.event_columns import EventColumns
from kvtape.planner.table import Ints
from kvtape.report.data.history import History
from kvtape.report.data.rectangles import Rectangles

__all__ = ["Thin", "thinned"]


@dataclass(frozen=True, slots=True)
class Thin:
    """`every`: events in a column (the last may have fewer). Rows of `rectangles` count columns instead of events.

    int64 `[n]` each, of a column's last event: `op`, `text`, `start`, `stop` (-1: none), `resident`, `cold`; `at` of
    its first event, and `elapsed`, the sum over its events (-1: not known of any), in nanoseconds. With `every` > 1
    `op`, `text`, `start` and `stop` are those of the event that took longest.
    """

    every: int
    op: Ints
    text: Ints
    start: Ints
    stop: Ints
    at: Ints
    elapsed: Ints
    resident: Ints
    cold: Ints
    rectangles: Rectangles

    def __len__(self) -> int:
        return len(self.op)


def thinned(columns: EventColumns, past: History, at: Ints, elapsed: Ints, text: Ints, every: int) -> Thin:
    """`at`, `elapsed`, `text`: of every event. A column shows the state after its last event."""
    n = len(columns)
    if every == 1:
        op = np.asarray(columns.op, dtype=np.int64)
        seen = (columns.start, columns.stop, at, elapsed, past.resident, past.cold)
        return Thin(1, op, text, *seen, past.rectangles)
    first = np.arange(0, n, every)
    last = np.minimum(first + every, n) - 1
    # Of equal ones the first: the order of one key is that of columns, then the longest, then the event.
    order = np.lexsort((np.arange(n), -elapsed, np.arange(n) // every))
    longest = order[first]
    known = np.add.reduceat(np.maximum(elapsed, 0), first)
    some = np.maximum.reduceat(elapsed, first)
    return Thin(
        every,
        columns.op[longest],
        text[longest],
        columns.start[longest],
        columns.stop[longest],
        at[first],
        np.where(some < 0, -1, known),
        past.resident[last],
        past.cold[last],
        _fewer(past.rectangles, every, n),
    )


def _fewer(shapes: Rectangles, every: int, n_events: int) -> Rectangles:
    """A column `j` shows event `(j + 1) * every - 1`, or the last."""
    since = shapes.since // every
    until = np.where(shapes.until == n_events, -(-n_events // every), shapes.until // every)
    seen = since < until
    order = np.lexsort((shapes.start[seen], since[seen]))
    parts = (shapes.start, shapes.stop, since, until, shapes.state)
    return Rectangles(*(part[seen][order] for part in parts))
