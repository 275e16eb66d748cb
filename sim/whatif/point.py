"""One simulation of a what-if: what it runs on, what is varied, what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtape.backends.errors import UsageError
from kvtape.planner.specs import SpecError
from kvtape.sim.costs.model import CostTable
from kvtape.sim.errors import Stalled
from kvtape.sim.whatif.grid import Point
from kvtape.sim.world.running import simulate
from kvtape.sim.world.script import Script

__all__ = ["Outcome", "Task", "Workload", "run_task"]


@dataclass(frozen=True, slots=True)
class Workload:
    """What every point runs on: sent once to each process, not with each point."""

    scripts: tuple[Script, ...]
    costs: CostTable
    n_ctx_train: int | None


@dataclass(frozen=True, slots=True)
class Task:
    point: Point

    def __str__(self) -> str:
        return str(self.point)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`figures` of the run (`measures.summary`); empty where `error` says why there was none."""

    figures: dict[str, Any]
    assumed: tuple[str, ...] = ()
    error: str | None = None


def run_task(workload: Workload, task: Task) -> Outcome:
    """A pure function of its arguments, so that it does not matter where it runs."""
    if task.point.error is not None:
        return Outcome({}, error=task.point.error)
    try:
        found = simulate(workload.scripts, task.point.settings, workload.costs, n_ctx_train=workload.n_ctx_train)
    except (UsageError, SpecError, Stalled) as err:
        return Outcome({}, error=str(err))
    return Outcome(found.figures, found.assumed)
