"""The runs of a log beside each other, for the panel of policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvtape.report.data.runs import OBJECTIVES, RunCost, run_costs
from kvtape.report.figures.chart import Axis, Chart, Series, chart_figure
from kvtape.report.figures.parts import MIB, Parts, scaled, turned
from kvtape.report.panel import Cell, Figure, Table
from kvtape.report.sources import Sources

__all__ = ["run_parts"]

_COLUMNS = (
    *("run", "kind", "policies", "sessions", "turns", "offered (tokens)", "generated (tokens)", "reused (tokens)"),
    *("computed (tokens)", "fewest possible", "computed again (tokens)", "forgotten (tokens)", "evicted (tokens)"),
    *("refused", "time in operations (s)", "most resident (tokens)", "peak KV (MiB)", "on the front of its like"),
)
_MOST_RUNS: Final = 200


def run_parts(sources: Sources) -> Parts:
    """A table with a row for each run, and runs of one workload as a picture. Raises LogUnreadable."""
    found = run_costs(sources.log, [run.run_id for run in sources.runs[:_MOST_RUNS]])
    over = ", ".join(OBJECTIVES).replace("_ns", "").replace("_", " ")
    title = f"Runs of this log, all sessions of each; the front is among runs of one kind and workload, over {over}"
    drawn = _figure([c for c in found if c.rivals])
    return Parts(
        () if drawn is None else (drawn,),
        (turned(Table(title, _COLUMNS, [_row(cost) for cost in found], len(sources.runs) - len(found))),),
    )


def _figure(compared: Sequence[RunCost]) -> Figure | None:
    shown = [c for c in compared if c.elapsed_ns is not None and c.peak_resident is not None]
    if not shown:
        return None
    series = []
    for kind in dict.fromkeys(c.kind for c in shown):
        of = [c for c in shown if c.kind == kind]
        texts = [f"{c.run_id}: {_policies(c)}{'; on the front' if c.on_front else ''}" for c in of]
        times = [(c.elapsed_ns or 0) / 1e9 for c in of]
        series.append(Series(kind, [c.peak_resident or 0 for c in of], times, "points", texts=texts))
    front = [f"{_policies(c)} ({c.run_id})" for c in shown if c.on_front]
    return chart_figure(
        "runs",
        "Runs of one workload: time against what was resident",
        f"{len(shown)} runs; nothing of their kind beats {'; '.join(front) or 'none of them'}. Time is the sum over "
        f"all operations of all sessions, memory that of the fullest session.",
        Chart(Axis("most resident", "tokens"), Axis("time in operations", "s"), tuple(series)),
    )


def _policies(cost: RunCost) -> str:
    return "; ".join(cost.policies) or "unknown"


def _row(c: RunCost) -> tuple[Cell, ...]:
    front = "alone" if c.on_front is None else f"{'yes' if c.on_front else 'no'}, of {c.rivals + 1}"
    return (
        *(c.run_id, c.kind, _policies(c), c.sessions, c.turns, c.offered, c.generated, c.reused),
        *(c.computed, c.least_computed, c.recomputed, c.forgotten, c.evicted, c.refused),
        *(scaled(c.elapsed_ns, 1e9), c.peak_resident, scaled(c.peak_kv, MIB), front),
    )
