"""One simulation of a what-if: what it runs on, what is varied, what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtape.backends.errors import UsageError
from kvtape.planner.specs import SpecError
from kvtape.sim.costs.model import CostTable
from kvtape.sim.errors import Stalled
from kvtape.sim.whatif.arrivals import resampled
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
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Task:
    """`draw`: the number of the arrivals that are drawn anew; None: as recorded."""

    point: Point
    draw: int | None = None

    def __str__(self) -> str:
        return str(self.point) if self.draw is None else f"{self.point}, draw {self.draw} of the arrivals"


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
    scripts, settings = workload.scripts, task.point.settings
    if task.draw is not None:
        scripts = resampled(scripts, settings.arrivals, workload.seed, task.draw)
    try:
        found = simulate(scripts, settings, workload.costs, n_ctx_train=workload.n_ctx_train)
    except (UsageError, SpecError, Stalled) as err:
        return Outcome({}, error=str(err))
    return Outcome(found.figures, found.assumed)
