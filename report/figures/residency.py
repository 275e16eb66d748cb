"""Panel: which tape positions were in the cache, and after which event."""

from __future__ import annotations

import numpy as np

from kvtape.report.data.history import STATES
from kvtape.report.data.views import SessionView
from kvtape.report.figures.missing import nothing_to_show
from kvtape.report.panel import Cell, Figure, Panel, Table
from kvtape.report.sources import Sources

__all__ = ["residency_panel"]

_LEAD = (
    "Every token ever fed or generated has a position on the tape, from bottom to top; events go from left to right. "
    "A cell of the map stands for a range of positions and a range of events, and has the colour of the state that "
    "most of its (position, event) pairs are in; where the tape is many times longer than the cache, of what is kept "
    "in it. Zooming in counts again from the exact states, up to one position and one event. Point at a cell for its "
    "counts and for what happened at the event."
)


def residency_panel(sources: Sources) -> Panel:
    title = "Residency map"
    if nothing := nothing_to_show(sources):
        return Panel("residency", title, _LEAD, missing=nothing)
    summaries = [_summary(view) for view in sources.views]
    figure = Figure(
        "residency-map",
        "What the cache held, by tape position and event",
        "residency",
        summaries[0],
        {"summaries": summaries},
        _table(sources),
    )
    return Panel("residency", title, f"{_LEAD} {thinning(sources)}".strip(), figures=(figure,))


def thinning(sources: Sources) -> str:
    """How the sessions on the page were chosen and thinned out; empty where everything is there."""
    parts = []
    if len(sources.views) < len(sources.sessions):
        parts.append(
            f"Shown are the {len(sources.views)} of {len(sources.sessions):,} sessions that have the most events; "
            "choose others with --session."
        )
    thin = [view for view in sources.views if view.thin.every > 1]
    if thin:
        names = ", ".join(f"{v.label} ({v.n_events:,} events, every {v.thin.every})" for v in thin)
        parts.append(f"Of long sessions the state after every k-th event is held: {names}.")
    parts += [
        f"{v.label} lost events from {v.lost_at:,} on: what it held after that is not known; sums are over the events "
        "that were recorded."
        for v in sources.views
        if v.lost_at is not None
    ]
    return " ".join(parts)


def _summary(view: SessionView) -> str:
    end, tape = view.history.final, view.history.longest
    cut = "" if end.tape_length == tape else f"the tape is cut back to {end.tape_length:,}: "
    return (
        f"Session {view.label}: {view.n_events:,} events on {tape:,} tape positions. At the end {cut}"
        f"{end.resident_tokens:,} tokens are resident, {end.cold_ranges.n_tokens:,} cold and "
        f"{end.dropped.n_tokens:,} dropped; the most that was resident at once is "
        f"{view.history.fullest:,}."
    )


def _table(sources: Sources) -> Table:
    columns = ("session", "events", "tape positions", "most resident (tokens)", "evicts", "admits")
    shares = tuple(f"{name} (share of pairs)" for name in STATES[1:])
    title = "The map in numbers; pairs of an event and a position that was on the tape by then"
    return Table(title, columns + shares, [_row(view) for view in sources.views])


def _row(view: SessionView) -> tuple[Cell, ...]:
    past = view.history
    areas = np.zeros(len(STATES))
    shapes = past.rectangles
    np.add.at(areas, shapes.state, (shapes.stop - shapes.start) * (shapes.until - shapes.since))
    total = areas.sum()
    return (
        view.label,
        view.n_events,
        past.longest,
        past.fullest,
        view.evicts,
        view.admits,
        *(float(a / total) if total else 0.0 for a in areas[1:]),
    )
