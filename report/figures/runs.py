"""The runs of a log beside each other, for the panel of policies."""

from __future__ import annotations

from kvtape.report.data.runs import OBJECTIVES, RunCost, run_costs
from kvtape.report.panel import Cell, Table
from kvtape.report.sources import Sources

__all__ = ["run_tables"]

_COLUMNS = (
    *("run", "kind", "policies", "sessions", "turns", "offered (tokens)", "generated (tokens)", "reused (tokens)"),
    *("computed (tokens)", "computed again (tokens)", "forgotten (tokens)", "evicted (tokens)", "refused"),
    *("time in operations (s)", "most resident (tokens)", "peak KV (MiB)", "on the front of its like"),
)


def run_tables(sources: Sources) -> list[Table]:
    """One row a run, recorded or simulated. Raises LogUnreadable."""
    found = run_costs(sources.log, [run.run_id for run in sources.runs])
    over = ", ".join(OBJECTIVES).replace("_ns", "").replace("_", " ")
    title = f"Runs of this log, all sessions of each; the front is among runs of one kind and workload, over {over}"
    return [Table(title, _COLUMNS, [_row(cost) for cost in found])]


def _row(c: RunCost) -> tuple[Cell, ...]:
    front = "alone" if c.on_front is None else f"{'yes' if c.on_front else 'no'}, of {c.rivals + 1}"
    return (
        *(c.run_id, c.kind, "; ".join(c.policies) or "unknown", c.sessions, c.turns, c.offered, c.generated, c.reused),
        *(c.computed, c.recomputed, c.forgotten, c.evicted, c.refused),
        *(None if c.elapsed_ns is None else c.elapsed_ns / 1e9, c.peak_resident),
        *(None if c.peak_kv is None else c.peak_kv / 2**20, front),
    )
