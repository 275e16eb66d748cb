"""Panels of sessions: the residency map, the time line, occupancy. All three draw the same columns of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtape.planner.events import Op
from kvtape.report.data.history import STATES
from kvtape.report.data.views import SessionView
from kvtape.report.packing import pack

__all__ = ["packed_sessions", "session_data"]


def packed_sessions(views: Sequence[SessionView]) -> dict[str, str]:
    """The long columns of every session, by the id of their block in the page."""
    found: dict[str, str] = {}
    for i, view in enumerate(views):
        t, r = view.thin, view.thin.rectangles
        found[f"events-{i}"] = pack([t.op, t.text, t.start, t.stop, t.at, t.elapsed, t.resident, t.cold])
        found[f"states-{i}"] = pack([r.since, r.until - r.since, r.start, r.stop - r.start, r.state])
    return found


def session_data(views: Sequence[SessionView]) -> Mapping[str, Any]:
    """What the script must know to draw sessions: names, numbers of rows, limits."""
    return {
        "states": list(STATES),
        "ops": [str(op) for op in Op],
        "sessions": [_one(i, view) for i, view in enumerate(views)],
    }


def _one(number: int, view: SessionView) -> dict[str, Any]:
    limits = view.limits
    return {
        "label": view.label,
        "events": f"events-{number}",
        "states": f"states-{number}",
        "columns": len(view.thin),
        "every": view.thin.every,
        "n_events": view.n_events,
        "rectangles": len(view.thin.rectangles),
        "tape": int(view.history.tape_length.max(initial=0)),
        "texts": list(view.texts),
        "context": limits.context,
        "budget": limits.policy_budget,
        "plans": [list(pair) for pair in limits.plans],
        "sink": limits.sink,
        "recent": limits.recent,
        "lost_at": view.lost_at,
    }
