"""Carrying a what-if out: every point simulated, wherever that runs, and the front marked; the rows are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtape.sim.costs.model import CostTable
from kvtape.sim.errors import SimulationError
from kvtape.sim.whatif.arrivals import has_choice
from kvtape.sim.whatif.executors import Executor, Serial
from kvtape.sim.whatif.grid import Point
from kvtape.sim.whatif.pareto import mark_front
from kvtape.sim.whatif.point import Workload, run_task
from kvtape.sim.whatif.rows import Draws, Progress, front_shares, simulated
from kvtape.sim.world.script import Script
from kvtape.sim.world.settings import Arrivals
from kvtape.sim.world.shapes import check_costs

__all__ = ["Swept", "sweep", "without_choice"]


@dataclass(frozen=True, slots=True)
class Swept:
    """One row a point, in the order of the points; `assumed` by any of them.

    `pareto` of a row: on the front of the medians; `pareto_share`: of the draws in which it is on the front, None
    where arrivals are as recorded.
    """

    rows: list[dict[str, Any]]
    assumed: list[str]


def sweep(
    scripts: Sequence[Script],
    costs: CostTable,
    points: Sequence[Point],
    *,
    n_ctx_train: int | None = None,
    draws: Draws | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Swept:
    """Simulate every point. A point that cannot be is a row with an `error`, the others go on.

    Raises SimulationError for costs of another model and when no point can be, and what `executor` raises.
    """
    draws = draws or Draws()
    for script in scripts:
        check_costs(costs, script.row)
    workload = Workload(tuple(scripts), costs, n_ctx_train, draws.seed)
    with (executor or Serial()).open(run_task, workload) as run:
        found = simulated(run, points, draws, progress)
    if found.rows and all(row["error"] is not None for row in found.rows):
        raise SimulationError(f"no point can be simulated; the first says: {found.rows[0]['error']}")
    shares = front_shares(found) if draws.count > 1 else [None] * len(points)
    for row, on_front, share in zip(found.rows, mark_front(found.rows), shares, strict=True):
        row |= {"pareto": on_front, "pareto_share": share}
    kinds = {point.settings.arrivals for point in points}
    return Swept(
        found.rows, found.assumed + [text for kind in sorted(kinds) for text in without_choice(scripts, kind, draws)]
    )


def without_choice(scripts: Sequence[Script], arrivals: Arrivals, draws: Draws) -> list[str]:
    """What has to be said where draws of this log's arrivals cannot differ."""
    if draws.count == 1 or has_choice(scripts, arrivals):
        return []
    return ["nothing to draw anew: the log has too few conversations or gaps, so intervals have no width"]
