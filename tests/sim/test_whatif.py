"""What-ifs: points, the Pareto front, and the same rows however many processes make them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtape.planner.specs import SpecError
from kvtape.sim.errors import SimulationError
from kvtape.sim.whatif.grid import Grid, points_of, read_grid
from kvtape.sim.whatif.pareto import OBJECTIVES, Better, compared, mark_front
from kvtape.sim.whatif.processes import Processes
from kvtape.sim.whatif.sweep import sweep
from kvtape.sim.world.reading import read_scripts
from kvtape.sim.world.script import Script
from kvtape.sim.world.settings import Settings
from support.simulated import MemoryLog, flat_costs, play_two_turns, recorded_toy

COSTS = flat_costs(prefill=10, decode=100, evict=1)


@pytest.fixture(scope="module")
def scripts() -> tuple[Script, ...]:
    return read_scripts(MemoryLog([recorded_toy(play_two_turns, session_id=name) for name in ("a", "b")]))


def test_a_budget_is_the_context_and_what_a_policy_lacks() -> None:
    axes = {"policy": ["none", "stream", "stream:sink=2,recent=9", "class", "class:budget=20"], "budget": [64]}
    found = points_of(axes, Settings())
    assert [p.policy for p in found] == [
        "none",
        "stream:sink=4,recent=44",
        "stream:sink=2,recent=9",
        "class:budget=64",
        "class:budget=20",
    ]
    assert {p.settings.n_ctx for p in found} == {64}


def test_every_axis_is_crossed_and_equal_points_are_one() -> None:
    axes = {"policy": ["none", "none"], "budget": [32, 64], "slots": [1, 2], "cold_tokens": [0], "block": [8]}
    found = points_of(axes, Settings())
    assert [(p.budget, p.settings.slots) for p in found] == [(32, 1), (32, 2), (64, 1), (64, 2)]


@pytest.mark.parametrize("text", ["lru:budget=4", "class:size=3", "stream:sink=x", "random"])
def test_a_spec_that_is_wrong_at_every_budget_ends_it(text: str) -> None:
    with pytest.raises(SpecError):
        points_of({"policy": [text], "budget": [64]}, Settings())


def test_no_policy_and_no_slot_are_refused() -> None:
    with pytest.raises(SimulationError, match="no policy"):
        points_of({}, Settings())
    with pytest.raises(SimulationError, match="slot"):
        points_of({"policy": ["none"], "slots": [0]}, Settings())


def test_a_point_that_cannot_be_is_a_row_and_the_others_go_on(scripts: tuple[Script, ...]) -> None:
    axes = {"policy": ["stream:sink=4,recent=40,block=8", "none:block=8", "h2o:recent=4"], "budget": [32, 128]}
    rows = sweep(scripts, COSTS, points_of(axes, Settings())).rows
    said = [(r["policy"].split(":")[0], r["budget"], r["error"] is None) for r in rows]
    assert said == [
        ("stream", 32, False),
        ("stream", 128, True),
        ("none", 32, True),
        ("none", 128, True),
        ("h2o", 32, False),
        ("h2o", 128, False),
    ]
    assert "needs a context of at least" in rows[0]["error"]
    assert "ranks by attention" in rows[4]["error"]
    assert [r["not_served"] for r in rows[1:4]] == [0, 4, 0]


def test_when_no_point_can_be_that_is_the_error(scripts: tuple[Script, ...]) -> None:
    with pytest.raises(SimulationError, match="no point can be simulated"):
        sweep(scripts, COSTS, points_of({"policy": ["h2o:recent=4"], "budget": [64]}, Settings()))


def test_rows_are_the_same_for_any_number_of_workers(scripts: tuple[Script, ...]) -> None:
    axes = {"policy": ["none:block=8", "stream:block=8", "class:block=8"], "budget": [48, 96], "slots": [1]}
    points = points_of(axes, Settings(arrivals="closed"))
    seen: list[tuple[int, int]] = []
    alone = sweep(scripts, COSTS, points, progress=lambda done, total: seen.append((done, total)))
    assert sweep(scripts, COSTS, points, executor=Processes(3)) == alone
    assert seen == [(i + 1, 6) for i in range(6)]
    assert any(row["pareto"] for row in alone.rows)


FIGURES = st.fixed_dictionaries({name: st.integers(0, 3) for name in ("not_served", *OBJECTIVES)})


@pytest.fixture(params=["less", "more"])
def better(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Better:
    """The second objective, turned round in one of two runs."""
    monkeypatch.setitem(cast("dict[str, Better]", OBJECTIVES), "ttft_p95_ns", request.param)
    return cast("Better", request.param)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(FIGURES | st.just({}), min_size=1, max_size=9))
def test_the_front_is_what_nothing_beats_among_those_that_serve_most(
    better: Better, rows: list[dict[str, Any]]
) -> None:
    def no_worse(one: dict[str, Any], other: dict[str, Any], name: str) -> bool:
        return bool(one[name] >= other[name] if OBJECTIVES[name] == "more" else one[name] <= other[name])

    marks = mark_front(rows)
    least = min((row["not_served"] for row in rows if row), default=0)
    rivals = [row for row in rows if row and row["not_served"] == least]
    for row, on_front in zip(rows, marks, strict=True):
        beaten = any(all(no_worse(o, row, k) for k in OBJECTIVES) and o != row for o in rivals if row in rivals)
        assert on_front == (row in rivals and not beaten)
    assert any(marks) == any(rows)


def test_what_no_row_has_a_figure_for_is_not_compared() -> None:
    signs = {name: 1 if way == "less" else -1 for name, way in OBJECTIVES.items()}
    rows = [{"not_served": 0, **{k: n * sign for k, sign in signs.items()}, "tpot_p95_ns": None} for n in (1, 2)]
    assert compared(rows) == {name: way for name, way in OBJECTIVES.items() if name != "tpot_p95_ns"}
    assert mark_front(rows) == [True, False]
    rows[1]["tpot_p95_ns"] = 5
    assert mark_front(rows) == [False, True]


def test_who_knows_the_future_is_not_on_the_front_and_keeps_nobody_off_it() -> None:
    signs = {name: 1 if way == "less" else -1 for name, way in OBJECTIVES.items()}
    known, real, worse = ({"not_served": n, **{k: n * s for k, s in signs.items()}} for n in (0, 1, 1))
    worse |= {"peak_kv_bytes": 2}
    assert mark_front([known | {"clairvoyant": True}, real, worse]) == [False, True, False]
    assert mark_front([known, real, worse]) == [True, False, False]


def test_who_serves_nobody_is_not_on_the_front_even_alone() -> None:
    idle = {"served": 0, "not_served": 1, "peak_kv_bytes": 0, "recomputed_tokens": 0}
    assert mark_front([idle, idle]) == [False, False]
    assert mark_front([idle, idle | {"served": 2}]) == [False, True]
    assert mark_front([idle | {"cut_short": 1}]) == [True]


def test_a_grid_file_has_the_lists(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    path.write_text(json.dumps({"policy": ["none"], "budget": [8, 16]}), encoding="utf-8")
    assert read_grid(path) == Grid({"policy": ["none"], "budget": [8, 16]})
    path.write_text(json.dumps({"block": [8], "policy": ["none"], "seeds": 9, "seed": 3}), encoding="utf-8")
    assert read_grid(path) == Grid({"policy": ["none"], "block": [8]}, 9, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON; a grid is"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no object"),
        ('{"polices": []}', "did you mean 'policy'"),
        ('{"budget": [true]}', "budget must be a list of whole numbers of at least 2"),
        ('{"budget": [-1]}', "at least 2"),
        ('{"budget": [0]}', "at least 2"),
        ('{"budget": 8}', "budget must be a list"),
        ('{"budget": []}', "budget must be a list"),
        ('{"budget": [99999999999999999999]}', "budget must be a list"),
        ('{"slots": [0]}', "at least 1"),
        ('{"policy": 3}', "policy must be a list of specs"),
        ('{"policy": ["none", 3]}', "policy must be a list of specs"),
        ('{"budget": [8], "budget": [16]}', "budget is there twice"),
        ('{"seeds": [3]}', "seeds must be one whole number of at least 1"),
        ('{"seeds": 0}', "at least 1"),
        ('{"seed": 1.5}', "seed must be one whole number"),
    ],
)
def test_a_bad_grid_is_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "grid.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SimulationError, match=r"grid\.json") as caught:
        read_grid(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(SimulationError, match="no such file"):
        read_grid(tmp_path / "other.json")
