"""Panels of sessions: the residency map, the time line, occupancy. All three draw the same columns of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvtape.planner.events import Op
from kvtape.report.data.history import STATES
from kvtape.report.data.views import SessionView
from kvtape.report.packing import pack

__all__ = ["packed_sessions", "session_data"]


def packed_sessions(views: Sequence[SessionView]) -> dict[str, str]:
    """The long columns of every session, by the id of their block in the page."""
    found: dict[str, str] = {}
    for i, view in enumerate(views):
        t, r, tick = view.thin, view.thin.rectangles, _tick_ns(view)
        elapsed = np.where(t.elapsed < 0, -1, t.elapsed // tick)
        found[f"events-{i}"] = pack([t.op, t.text, t.start, t.stop, t.at // tick, elapsed, t.resident, t.cold])
        found[f"states-{i}"] = pack([r.since, r.until - r.since, r.start, r.stop - r.start, r.state])
    return found


def session_data(views: Sequence[SessionView]) -> Mapping[str, Any]:
    """What the script must know to draw sessions: names, numbers of rows, limits."""
    return {
        "states": list(STATES),
        "ops": [str(op) for op in Op],
        "sessions": [_one(i, view) for i, view in enumerate(views)],
    }


def _tick_ns(view: SessionView) -> int:
    """What times are counted in on the page: ns, of sessions of more than 26 days a thousand of them, and so on."""
    longest = int(max(np.abs(view.thin.at).max(initial=0), view.thin.elapsed.max(initial=0)))
    tick = 1
    while longest // tick >= 2**51:
        tick *= 1000
    return tick


def _one(number: int, view: SessionView) -> dict[str, Any]:
    limits = view.limits
    return {
        "label": view.label,
        "events": f"events-{number}",
        "states": f"states-{number}",
        "columns": len(view.thin),
        "every": view.thin.every,
        "tick_ns": _tick_ns(view),
        "n_events": view.n_events,
        "rectangles": len(view.thin.rectangles),
        "tape": view.history.longest,
        "texts": list(view.texts),
        "context": limits.context,
        "budget": limits.policy_budget,
        "plans": [list(pair) for pair in limits.plans],
        "sink": limits.sink,
        "recent": limits.recent,
        "lost_at": view.lost_at,
    }
