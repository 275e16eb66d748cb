"""The rows of a what-if: one a point, from what its simulations came to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvtape.planner.specs import parse_spec
from kvtape.sim.quality.meter import FIGURES as MASS_FIGURES
from kvtape.sim.whatif.arrivals import METHOD
from kvtape.sim.whatif.confidence import RULE, interval, median
from kvtape.sim.whatif.executors import Runner
from kvtape.sim.whatif.grid import Point
from kvtape.sim.whatif.pareto import mark_front
from kvtape.sim.whatif.point import Outcome, Task
from kvtape.sim.world.settings import Settings

__all__ = ["FIGURES", "Draws", "Progress", "Rows", "draw_rules", "front_shares", "simulated"]

Progress = Callable[[int, int], None]

FIGURES: Final = (
    "turns",
    "served",
    "not_served",
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
    "lost_turns",
    "lost_caches",
    "not_repeated",
    *MASS_FIGURES,
    "opt_prefilled_tokens",
    "prefill_regret_tokens",
)
"""What a row has of a simulation's figures; `not_served`: turns that were refused, unserved or cut short."""


@dataclass(frozen=True, slots=True)
class Draws:
    """How often arrivals are drawn anew, and from which seed. `count` 1: they are as recorded."""

    count: int = 1
    seed: int = 0

    @property
    def numbers(self) -> tuple[int | None, ...]:
        return (None,) if self.count == 1 else tuple(range(self.count))


def draw_rules(settings: Settings, draws: Draws) -> dict[str, str]:
    """What the numbers of a report rest on where arrivals are drawn anew, in words."""
    if draws.count == 1:
        return {"confidence": "none: arrivals as recorded; --seeds draws them anew"}
    return {
        "draws": f"{draws.count} of seed {draws.seed}, the same for all points: {METHOD[settings.arrivals]}",
        "confidence": RULE,
    }


@dataclass(frozen=True, slots=True)
class Rows:
    """One row a point, in their order. `draws`: the same rows for each draw alone. `assumed` by any simulation."""

    rows: list[dict[str, Any]]
    draws: list[list[dict[str, Any]]]
    assumed: list[str]


def simulated(run: Runner, points: Sequence[Point], draws: Draws, progress: Progress | None = None) -> Rows:
    """Simulate every point at every draw. What cannot be is a row with an `error`, the others go on."""
    tasks = [Task(point, number) for point in points for number in draws.numbers]
    outcomes: dict[int, Outcome] = {}
    for index, outcome in run(tasks):
        outcomes[index] = outcome
        if progress is not None:
            progress(len(outcomes), len(tasks))
    n = len(draws.numbers)
    found = [[outcomes[i * n + k] for k in range(n)] for i in range(len(points))]
    assumed = dict.fromkeys(text for each in found for outcome in each for text in outcome.assumed)
    alone = [[_row(p, [each[k]]) for p, each in zip(points, found, strict=True)] for k in range(n)]
    return Rows([_row(p, each) for p, each in zip(points, found, strict=True)], alone, list(assumed))


def front_shares(found: Rows) -> list[float]:
    """For each point the share of draws in which it is on the front: every draw is the same traffic for all points."""
    marks = [mark_front(rows) for rows in found.draws]
    return [sum(of_point) / len(marks) for of_point in zip(*marks, strict=True)]


def _row(point: Point, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    s = point.settings
    error = next((o.error for o in outcomes if o.error is not None), None)
    figures = [o.figures if error is None else {} for o in outcomes]
    several = {name: [_figure(f, name) for f in figures] for name in FIGURES}
    row = {
        "policy": point.policy,
        "budget": point.budget,
        "slots": s.slots,
        "cold_tokens": s.cold_tokens,
        "block": s.block,
        "clairvoyant": parse_spec(point.policy).name == "opt",
        "error": error,
        **{name: median(values) for name, values in several.items()},
    }
    return row | {
        "intervals": {name: interval(values) for name, values in several.items()} if len(outcomes) > 1 else None
    }


def _figure(figures: dict[str, Any], name: str) -> Any:
    if name == "not_served":
        return figures["turns"] - figures["served"] if figures else None
    return figures.get(name)
