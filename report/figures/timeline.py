"""Panel: when a session did what, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence

from kvtape.report.data.commands import RECORD
from kvtape.report.data.costs import Cost, costs
from kvtape.report.data.views import SessionView
from kvtape.report.figures.missing import nothing_to_show
from kvtape.report.figures.parts import scaled
from kvtape.report.figures.residency import thinning
from kvtape.report.panel import Cell, Figure, Missing, Panel, Table
from kvtape.report.sources import Sources

__all__ = ["timeline_panel"]

_LEAD = (
    "A session's operations in time, a lane for each kind: prefill, decode, rows put back (admit, recompute, restore), "
    "rows given up (evict, shift, truncate, trim), and the rest. The height at a pixel is the share of its time that "
    "the operations took; an event too short to see still shows. Times are those of the clock that the run was "
    "recorded with."
)


def timeline_panel(sources: Sources) -> Panel:
    title = "Time line and costs"
    if nothing := nothing_to_show(sources):
        return Panel("timeline", title, _LEAD, missing=nothing)
    shown = {(v.row.run_id, v.row.session_id): v.label for v in sources.views}
    found = [c for c in costs(sources.log) if (c.run_id, c.session_id) in shown]
    summaries = [_summary(view, found) for view in sources.views]
    data = {"summaries": summaries}
    figure = Figure("timeline-lanes", "Operations in time", "timeline", summaries[0], data)
    table = Table("What operations cost", _COLUMNS, [_row(shown[c.run_id, c.session_id], c) for c in found])
    missing = () if any(c.elapsed_ns for c in found) else (_UNMEASURED,)
    return Panel("timeline", title, f"{_LEAD} {thinning(sources)}".strip(), (figure,), (table,), missing)


_COLUMNS = (
    "session",
    "operation",
    "way",
    "events",
    "tokens",
    "computed (tokens)",
    "time (ms)",
    "time of one (ms)",
    "time of a token (ms)",
)

_UNMEASURED = Missing(
    "No operation of these sessions was timed, so the lanes only show when events were.",
    f"{RECORD}       # times are measured on a real engine\nkvtape simulate L --costs costs.json    # or modelled",
)


def _row(label: str, c: Cost) -> tuple[Cell, ...]:
    ms = scaled(c.elapsed_ns, 1e6)
    return (
        label,
        c.op,
        c.way or "",
        c.events,
        "" if c.tokens is None else c.tokens,
        "" if c.computed is None else c.computed,
        ms,
        scaled(ms, c.measured),
        "" if not c.tokens else None if ms is None or not c.measured_tokens else ms / c.measured_tokens,
    )


def _summary(view: SessionView, found: Sequence[Cost]) -> str:
    own = [c for c in found if (c.run_id, c.session_id) == (view.row.run_id, view.row.session_id)]
    total = sum(c.elapsed_ns or 0 for c in own)
    if not total:
        return f"Session {view.label}: {view.n_events:,} events; how long they took was not measured."
    by_op: dict[str, int] = {}
    for c in own:
        by_op[c.op] = by_op.get(c.op, 0) + (c.elapsed_ns or 0)
    most = sorted(by_op.items(), key=lambda pair: (-pair[1], pair[0]))[:3]
    parts = ", ".join(f"{op} {ns / total:.0%}" for op, ns in most if ns)
    return f"Session {view.label}: operations took {_seconds(total)} in all; of that {parts}."


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:,.1f} s" if ns >= 1e10 else f"{ns / 1e9:.3g} s"
