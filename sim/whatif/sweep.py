"""Carrying a what-if out: one simulation a point, in this process or in several; the rows are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Final

from kvtape.backends.errors import UsageError
from kvtape.planner.specs import SpecError
from kvtape.sim.costs.model import CostTable
from kvtape.sim.errors import SimulationError
from kvtape.sim.whatif.grid import Point
from kvtape.sim.whatif.pareto import mark_front
from kvtape.sim.world.running import simulate
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
)


@dataclass(frozen=True, slots=True)
class Swept:
    """One row a point, in the order of the points; `assumed` by any of them."""

    rows: list[dict[str, Any]]
    assumed: list[str]


@dataclass(frozen=True, slots=True)
class _World:
    scripts: tuple[Script, ...]
    costs: CostTable
    n_ctx_train: int | None


_here: _World | None = None
"""What the points of this process run on: sent once, not with each point."""


def sweep(
    scripts: Sequence[Script],
    costs: CostTable,
    points: Sequence[Point],
    *,
    n_ctx_train: int | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> Swept:
    """Simulate every point. A point that cannot be is a row with an `error`, the others go on.

    Raises SimulationError for costs of another model and when no point can be.
    """
    if workers < 1:
        raise SimulationError(f"{workers} workers; at least 1 has to do the work")
    for script in scripts:
        check_costs(costs, script.row)
    world = _World(tuple(scripts), costs, n_ctx_train)
    rows: list[dict[str, Any]] = []
    assumed: dict[str, None] = {}
    for row, said in _results(world, points, min(workers, len(points))):
        rows.append(row)
        assumed |= dict.fromkeys(said)
        if progress is not None:
            progress(len(rows), len(points))
    if rows and all(row["error"] is not None for row in rows):
        raise SimulationError(f"no point can be simulated; the first says: {rows[0]['error']}")
    for row, on_front in zip(rows, mark_front(rows), strict=True):
        row["pareto"] = on_front
    return Swept(rows, list(assumed))


def _results(world: _World, points: Sequence[Point], workers: int) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    if workers == 1:
        yield from (_point(world, point) for point in points)
        return
    # A fork would copy the threads of a database in the middle of what they do.
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin, (world,)) as pool:
        yield from pool.map(_run, points)


def _begin(world: _World) -> None:
    global _here
    _here = world


def _run(point: Point) -> tuple[dict[str, Any], tuple[str, ...]]:
    assert _here is not None
    return _point(_here, point)


def _point(world: _World, point: Point) -> tuple[dict[str, Any], tuple[str, ...]]:
    s = point.settings
    row: dict[str, Any] = {
        "policy": point.policy,
        "budget": point.budget,
        "slots": s.slots,
        "cold_tokens": s.cold_tokens,
        "block": s.block,
        "error": point.error,
        "not_served": None,
        **dict.fromkeys(_FIGURES),
    }
    if point.error is not None:
        return row, ()
    try:
        found = simulate(world.scripts, s, world.costs, n_ctx_train=world.n_ctx_train)
    except (UsageError, SpecError) as err:
        row["error"] = str(err)
        return row, ()
    row |= {name: found.figures[name] for name in _FIGURES}
    row["not_served"] = found.figures["turns"] - found.figures["served"]
    return row, found.assumed
