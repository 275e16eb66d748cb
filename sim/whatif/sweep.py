"""Carrying a what-if out: one simulation a point, wherever they run; the rows are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvtape.planner.specs import parse_spec
from kvtape.sim.costs.model import CostTable
from kvtape.sim.errors import SimulationError
from kvtape.sim.quality.meter import FIGURES as MASS_FIGURES
from kvtape.sim.whatif.executors import Executor, Serial
from kvtape.sim.whatif.grid import Point
from kvtape.sim.whatif.pareto import mark_front
from kvtape.sim.whatif.point import Outcome, Task, Workload, run_task
from kvtape.sim.world.script import Script
from kvtape.sim.world.shapes import check_costs

__all__ = ["Swept", "sweep"]

Progress = Callable[[int, int], None]

_FIGURES: Final = (
    "turns",
    "served",
    "cut_short",
    "refused",
    "unserved",
    "ttft_p50_ns",
    "ttft_p95_ns",
    "tpot_p50_ns",
    "tpot_p95_ns",
    "latency_p50_ns",
    "latency_p95_ns",
    "queued_p95_ns",
    "end_ns",
    "peak_kv_bytes",
    "prefilled_tokens",
    "reused_tokens",
    "forgotten_tokens",
    "recomputed_tokens",
    "evicted_tokens",
    "admitted_tokens",
    "displaced",
    "not_repeated",
    *MASS_FIGURES,
    "opt_prefilled_tokens",
    "prefill_regret_tokens",
)


@dataclass(frozen=True, slots=True)
class Swept:
    """One row a point, in the order of the points; `assumed` by any of them."""

    rows: list[dict[str, Any]]
    assumed: list[str]


def sweep(
    scripts: Sequence[Script],
    costs: CostTable,
    points: Sequence[Point],
    *,
    n_ctx_train: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Swept:
    """Simulate every point. A point that cannot be is a row with an `error`, the others go on.

    Raises SimulationError for costs of another model and when no point can be, and what `executor` raises.
    """
    for script in scripts:
        check_costs(costs, script.row)
    workload = Workload(tuple(scripts), costs, n_ctx_train)
    outcomes: dict[int, Outcome] = {}
    tasks = [Task(point) for point in points]
    with (executor or Serial()).open(run_task, workload) as run:
        for index, outcome in run(tasks):
            outcomes[index] = outcome
            if progress is not None:
                progress(len(outcomes), len(tasks))
    found = [outcomes[i] for i in range(len(tasks))]
    rows = [_row(point, outcome) for point, outcome in zip(points, found, strict=True)]
    if rows and all(row["error"] is not None for row in rows):
        raise SimulationError(f"no point can be simulated; the first says: {rows[0]['error']}")
    for row, on_front in zip(rows, mark_front(rows), strict=True):
        row["pareto"] = on_front
    return Swept(rows, list(dict.fromkeys(text for outcome in found for text in outcome.assumed)))


def _row(point: Point, outcome: Outcome) -> dict[str, Any]:
    s, figures = point.settings, outcome.figures
    return {
        "policy": point.policy,
        "budget": point.budget,
        "slots": s.slots,
        "cold_tokens": s.cold_tokens,
        "block": s.block,
        "clairvoyant": parse_spec(point.policy).name == "opt",
        "error": outcome.error,
        "not_served": figures["turns"] - figures["served"] if figures else None,
        **{name: figures.get(name) for name in _FIGURES},
    }
