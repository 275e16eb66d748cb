"""The residency map of a session: what every position of the tape was after every event.

Of a session with very many changes every so many-th event and position is drawn, which the picture says: a point of it
shows one of them, never a mean of states.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import numpy as np

from kvtape.cli.plots.canvas import document, line, rect, text, width_of
from kvtape.cli.plots.frame import Frame, even_axis
from kvtape.cli.plots.legend import Entry, legend, legend_width
from kvtape.planner.event_columns import EventColumns
from kvtape.planner.rows import SessionRow
from kvtape.planner.table import Ints
from kvtape.report.data.history import COLD, DROPPED, RECENT, RESIDENT, SINK, STATES, History, history
from kvtape.report.data.views import known_policy, shown_spans
from kvtape.traces.reader import Log

__all__ = ["residency_picture"]

_LEFT, _TOP, _WIDTH, _HEIGHT, _BELOW = 84, 64, 640, 400, 56
_MOST_AREAS = 4000
_COLUMNS, _ROWS = 640, 400
"""Events and tape positions that are told apart where there are more areas than that."""

_SHOWN = (RESIDENT, RECENT, SINK, COLD, DROPPED)
_MEANT = {RECENT: "resident: recent", SINK: "resident: sink"}


def residency_picture(log: Log, row: SessionRow, *, at: int | None = None) -> str:
    """As SVG, up to where events were lost, if any. `at`: the event to mark. Raises IllegalEvent as the fold does."""
    columns = log.columns(row.run_id, row.session_id, log.lost_at(row.run_id, row.session_id))
    sink, recent = shown_spans(known_policy(row))
    past = history(columns, sink=sink, recent=recent)
    n, longest = len(past), int(past.tape_length.max(initial=0))
    whole = len(past.rectangles) <= _MOST_AREAS
    every, grain = (1, 1) if whole else (max(1, ceil(n / _COLUMNS)), max(1, ceil(longest / _ROWS)))
    title = f"What was resident: session {row.session_id}, {row.policy or 'unknown policy'}"
    frame = Frame(
        _LEFT,
        _TOP,
        _WIDTH,
        _HEIGHT,
        even_axis("event (seq)", max(n, 1), most=10),
        even_axis("tape position, tokens", max(longest, 1)),
    )
    entries = [Entry(_MEANT.get(state, STATES[state]), STATES[state], "area") for state in _SHOWN]
    if at is not None:
        entries.append(Entry(f"event {at}", "ink", dash="4 3"))
    parts = [text(_LEFT, 24, title), text(_LEFT, 44, _how(every, grain, longest), colour="faint"), *frame.parts()]
    parts += _areas(past, frame, every, grain)
    parts += _turns(columns, frame)
    if at is not None:
        parts.append(line(frame.x(at + 1), frame.top, frame.x(at + 1), frame.bottom, "ink", width=1.5, dash="4 3"))
    parts += legend(frame.right + 20, _TOP, entries)
    return document(frame.right + 32 + legend_width(entries), frame.bottom + _BELOW, title, parts)


def _how(every: int, grain: int, longest: int) -> str:
    if not longest:
        return "No event of this session puts a token on the tape: there is nothing to draw."
    if (every, grain) == (1, 1):
        return "every event, every position"
    return f"drawn: one event of {every}, one position of {grain}"


def _areas(past: History, frame: Frame, every: int, grain: int) -> Iterator[str]:
    """A rectangle for each range that stays the same; one that no drawn event or position falls into is not there.

    What is thinner than a pixel (a sink of four tokens, say) is drawn as thick as one, over the others.
    """
    shapes = past.rectangles
    since, until = _sampled(shapes.since, every), _sampled(shapes.until, every)
    start, stop = _sampled(shapes.start, grain), _sampled(shapes.stop, grain)
    thin = []
    for i in np.flatnonzero((since < until) & (start < stop)).tolist():
        left, right = frame.x(int(since[i]) * every), frame.x(min(int(until[i]) * every, len(past)))
        top, bottom = frame.y(int(stop[i]) * grain), frame.y(int(start[i]) * grain)
        drawn = rect(left, min(top, bottom - 1), right - left, max(bottom - top, 1), STATES[int(shapes.state[i])])
        if bottom - top < 1:
            thin.append(drawn)
        else:
            yield drawn
    yield from thin


def _sampled(edges: Ints, step: int) -> Ints:
    """Of the edges of half-open ranges: the first multiple of `step` at or above each, counted in steps."""
    return -(-edges // step)


def _turns(columns: EventColumns, frame: Frame) -> Iterator[str]:
    """Where turns begin, with their numbers where there is room."""
    end = float("-inf")
    for i in np.flatnonzero(np.diff(columns.turn, prepend=-1)).tolist():
        at = frame.x(i)
        if int(columns.turn[i]) and at > end:
            said = f"turn {int(columns.turn[i])}"
            yield line(at, frame.top - 4, at, frame.bottom, "faint", dash="1 3")
            yield text(at + 2, frame.top - 6, said, colour="faint")
            end = at + width_of(said) + 8
