"""The search: conditions with units, spaces of choices, and the same optimum as trying everything."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.cli.errors import describe
from kvtape.planner.specs import SpecError
from kvtape.sim.errors import NoAttention, SimulationError
from kvtape.sim.whatif.conditions import (
    ALL_SERVED,
    Condition,
    Goal,
    parse_condition,
    parse_goal,
    violation,
)
from kvtape.sim.whatif.executors import Executor, Serial
from kvtape.sim.whatif.grid import Point
from kvtape.sim.whatif.point import Workload, run_task
from kvtape.sim.whatif.processes import Processes
from kvtape.sim.whatif.rows import Draws, simulated
from kvtape.sim.whatif.search import Found, Scored, Wish, _Optuna, search
from kvtape.sim.whatif.space import Space, budgets_between
from kvtape.sim.world.reading import read_scripts
from kvtape.sim.world.settings import Settings
from support.simulated import MemoryLog, flat_costs, play_two_turns, recorded_toy

COSTS = flat_costs(prefill=10, decode=100, evict=1_000)
BASE = Settings(arrivals="closed")


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("ttft_p95<=0.5s", Condition("ttft_p95_ns", "<=", Fraction(500_000_000))),
        ("ttft_p95_ns <= 1.5 ms", Condition("ttft_p95_ns", "<=", Fraction(1_500_000))),
        ("peak_kv<=2GiB", Condition("peak_kv_bytes", "<=", Fraction(2**31))),
        ("peak_kv_bytes<=4096", Condition("peak_kv_bytes", "<=", Fraction(4096))),
        ("retained_mass>=0.98", Condition("retained_mass", ">=", Fraction(98, 100))),
        ("forgotten<=3", Condition("forgotten_tokens", "<=", Fraction(3))),
        ("not_served<=0", ALL_SERVED),
    ],
)
def test_a_condition_is_in_the_unit_of_its_figure(text: str, condition: Condition) -> None:
    assert parse_condition(text) == condition


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "write FIGURE<=BOUND"),
        ("ttft_p95", "write FIGURE<=BOUND"),
        ("ttft_p95<5ms", "write FIGURE<=BOUND"),
        ("ttft_p95=5ms", "write FIGURE<=BOUND"),
        ("ttft_p95<=5", "no time"),
        ("ttft_p95<=-5ms", "no time"),
        ("peak_kv_bytes<=many", "no size"),
        ("retained_mass>=nan", "no number"),
        ("retained_mas>=0.9", "did you mean 'retained_mass'"),
        ("policy<=3", "unknown figure"),
    ],
)
def test_a_bad_condition_is_one_clear_line(text: str, said: str) -> None:
    with pytest.raises(SimulationError, match=said.replace("<=", "<=")) as caught:
        parse_condition(text)
    assert "\n" not in str(caught.value)


def test_a_goal_is_a_figure() -> None:
    assert parse_goal("ttft_p95", "less") == Goal("ttft_p95_ns", "less")
    assert parse_goal("retained_mass", "more").cost({"retained_mass": 0.5}) == -0.5
    assert parse_goal("retained_mass", "more").cost({"retained_mass": None}) is None
    with pytest.raises(SimulationError, match="unknown figure"):
        parse_goal("speed", "more")


@given(st.integers(0, 10**9) | st.floats(0, 1e9), st.sampled_from(("<=", ">=")), st.integers(0, 10**6))
def test_a_condition_is_missed_by_nothing_exactly_where_it_holds(value: float, sign: Any, bound: int) -> None:
    missed = violation(Condition("end_ns", sign, Fraction(bound)), {"end_ns": value})
    assert missed is not None
    assert missed >= 0
    assert (missed == 0) == (value <= bound if sign == "<=" else value >= bound)
    assert violation(Condition("end_ns", sign, Fraction(bound)), {"end_ns": None}) is None


@given(st.integers(2, 10**6), st.integers(0, 10**6))
def test_budgets_reach_from_end_to_end(low: int, more: int) -> None:
    found = budgets_between(low, low + more)
    assert (found[0], found[-1]) == (low, low + more)
    assert found == sorted(set(found))
    assert len(found) <= 32
    assert all(b % 32 == 0 for b in found[1:-1])


def test_what_a_spec_says_is_not_searched() -> None:
    policies = ("none", "stream:sink=2,recent=20", "stream:block=8", "class:budget=40,every=1,block=8,sink=0,recent=1")
    space = Space(policies, {"budget": [48, 96], "slots": [1, 2, 3]}, BASE)
    assert [sorted(space.dimensions(i)) for i in range(4)] == [
        ["budget", "slots"],
        ["block", "budget", "every", "slots"],
        ["budget", "every", "recent", "sink", "slots"],
        ["budget", "slots"],
    ]
    assert space.size == len(list(space.choices())) == 6 * (1 + 12 + 60 + 1)
    points = [space.point(choice) for choice in space.choices()]
    assert {p.policy for p in points if p.policy.startswith("class")} == {"class:budget=40,block=8"}
    shares = {p.policy for p in points if p.budget == 96 and "block=8" in p.policy and "every" not in p.policy}
    assert "stream:sink=4,recent=68,block=8" in shares  # three quarters of 96 with the sinks


@pytest.mark.parametrize("text", ["lru", "class:size=3", "stream:sink=x", "stream:sink=1,sink=2"])
def test_a_spec_that_no_choice_makes_right_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        Space((text,), {"budget": [64]}, BASE)


def test_who_knows_the_future_cannot_be_tuned() -> None:
    with pytest.raises(SimulationError, match="knows the future"):
        Space(("opt",), {"budget": [64]}, BASE)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(read_scripts(MemoryLog([recorded_toy(play_two_turns)])), COSTS, None)


POLICIES = ("none", "stream:every=1,block=8", "class:recent=4,every=1,block=8")
SPACE = Space(POLICIES, {"budget": [48, 64, 96, 128], "cold_tokens": [0, 32]}, BASE)


def found(workload: Workload, wish: Wish, trials: int, seed: int = 0, executor: Executor | None = None) -> Found:
    with (executor or Serial()).open(run_task, workload) as run:
        return search(run, SPACE, wish, trials=trials, seed=seed, draws=Draws())


@pytest.fixture(scope="module")
def everything(workload: Workload) -> Iterator[Mapping[str, Any]]:
    """The row of every point of the space, by its name."""
    points = list(dict.fromkeys(SPACE.point(choice) for choice in SPACE.choices()))
    with Serial().open(run_task, workload) as run:
        yield {str(p): r for p, r in zip(points, simulated(run, points, Draws()).rows, strict=True)}


WISHES = [
    Wish(Goal("peak_kv_bytes", "less"), (ALL_SERVED,)),
    Wish(Goal("latency_p95_ns", "less"), (ALL_SERVED, Condition("peak_kv_bytes", "<=", Fraction(7_000)))),
    Wish(Goal("forgotten_tokens", "less"), (ALL_SERVED, Condition("peak_kv_bytes", "<=", Fraction(7_000)))),
    Wish(Goal("evicted_tokens", "more"), (Condition("evicted_tokens", "<=", Fraction(60)),)),
]


@pytest.mark.parametrize("wish", WISHES, ids=lambda wish: wish.goal.name)
def test_a_search_of_a_quarter_of_the_space_finds_the_optimum_of_all_of_it(
    workload: Workload, everything: Mapping[str, Any], wish: Wish
) -> None:
    rows = [r for r in everything.values() if r["error"] is None]
    meets = [r for r in rows if all(violation(c, r) == 0 for c in wish.conditions)]
    assert 0 < len(meets) < len(rows)
    optimum = min(cost for cost in map(wish.goal.cost, meets) if cost is not None)
    some = found(workload, wish, trials=SPACE.size // 4)
    assert some.best is not None
    assert some.nearest is None
    assert some.best.cost == optimum
    assert some.best.row == everything[str(some.best.point)]
    assert "Optuna" in some.method


def test_a_space_of_few_choices_is_tried_in_full(workload: Workload, everything: Mapping[str, Any]) -> None:
    space = Space(("none", "class:recent=4,every=1,block=8"), {"budget": [48, 64]}, BASE)
    with Serial().open(run_task, workload) as run:
        all_ = search(run, space, WISHES[0], trials=99, seed=0, draws=Draws())
    assert all_.method == "every point of the space"
    assert len(all_.trials) == space.size == 8
    assert all_.best is not None
    assert all_.best.row["peak_kv_bytes"] == min(p.row["peak_kv_bytes"] for p in all_.points if p.feasible)


def test_equal_points_are_simulated_once(workload: Workload) -> None:
    tried: list[Any] = []

    def counted(subject: Workload, task: Any) -> Any:
        tried.append(task)
        return run_task(subject, task)

    with Serial().open(counted, workload) as run:
        result = search(run, SPACE, WISHES[3], trials=40, seed=0, draws=Draws())
    assert len(tried) == len(set(tried)) == len(result.points) < len(result.trials) <= 160
    assert sum(p.row["error"] is None for p in result.points) <= 40
    assert set(result.trials) == set(range(len(result.points)))


def scored(policy: str, budget: int, cost: float, peak: int, *misses: float) -> Scored:
    return Scored(Point(policy, budget, BASE), {"error": None, "peak_kv_bytes": peak}, cost, misses or (0.0,))


def test_of_equals_what_is_small_and_plain_is_better() -> None:
    wanted = [
        scored("stream:sink=4", 64, 1, 100),
        scored("stream:sink=4", 96, 1, 100),
        scored("a", 64, 1, 200),
        scored("class", 64, 2, 50),
        scored("stream:sink=4,recent=1", 64, 2, 50),
        scored("a", 2, 0, 1, 0.5),
    ]
    mixed = [wanted[i] for i in (5, 2, 4, 0, 3, 1)]
    assert sorted(mixed, key=lambda one: one.order) == wanted


def test_the_sampler_is_told_what_misses_its_conditions() -> None:
    asker = _Optuna(SPACE, 0)
    costs, misses = [1.0, 2.0, 3.0, 4.0], [0.5, 0.0, 0.0, 0.1]
    points = [SPACE.point(choice) for choice in asker.ask(4)]
    asker.tell([Scored(p, {"error": None}, c, (0.0, m)) for p, c, m in zip(points, costs, misses, strict=True)])
    assert asker._study.best_trial.value == 2.0


def test_a_seed_gives_the_same_search_for_any_number_of_workers(workload: Workload) -> None:
    one = found(workload, WISHES[1], 16, seed=3)
    assert one == found(workload, WISHES[1], 16, seed=3, executor=Processes(2))
    assert one.points != found(workload, WISHES[1], 16, seed=4).points


def test_where_nothing_is_feasible_the_nearest_point_is_named(workload: Workload) -> None:
    wish = Wish(Goal("latency_p95_ns", "less"), (ALL_SERVED, Condition("peak_kv_bytes", "<=", Fraction(10))))
    result = found(workload, wish, 16)
    assert result.best is None
    assert result.nearest is not None
    missed = [p.row["peak_kv_bytes"] for p in result.points if p.row["not_served"] == 0]
    assert result.nearest.row["peak_kv_bytes"] == min(missed) < max(missed)
    assert any(p.row["not_served"] for p in result.points)


def test_attention_that_the_log_has_not_is_refused_before_anything_runs(workload: Workload) -> None:
    def never(tasks: object) -> list[object]:
        raise AssertionError(tasks)

    wish = Wish(Goal("latency_p95_ns", "less"), (Condition("retained_mass", ">=", Fraction(1, 2)),))
    asking = dataclasses.replace(SPACE, scripts=workload.scripts)
    with pytest.raises(NoAttention, match=r"^retained_mass cannot be asked for; .*--score-all"):
        search(never, asking, wish, trials=8, seed=0, draws=Draws())  # type: ignore[arg-type]


def test_what_no_point_has_a_figure_of_is_an_error(workload: Workload) -> None:
    wish = Wish(Goal("latency_p95_ns", "less"), (Condition("retained_mass", ">=", Fraction(1, 2)),))
    with pytest.raises(SimulationError, match=r"no point has a figure retained_mass.*--score-all"):
        found(workload, wish, 8)


def test_without_optuna_the_remedy_is_named(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        found(workload, WISHES[0], 8)
    assert describe(caught.value) == (3, "optuna is not installed; install it with: pip install 'kvtape[tune]'")
