"""A short soak of a real server, and that what is held against a soak can fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.protocol import SessionConfig
from kvtape.serve.requests import TokenChoice
from support.llama_tiny import model_file
from support.serve_checks import Alone, LoggedTurn, is_near_tie, key_of, memory, missing, percentiles
from support.serve_faults import FAULTS, plan_faults
from support.serve_load import Told
from support.serve_soak import Soak

TOLD = Told("c0", 0, ({"role": "user", "content": "the cache"},), "text", 20, 4, 3, 0.1, 0.2, True)


def test_faults_lose_nothing_and_mix_nothing(tmp_path: Path) -> None:
    soak = Soak(
        model_file(),
        "llama",
        talks=4,
        turns=3,
        clients=3,
        slots=2,
        max_tokens=12,
        n_ctx=512,
        seed=3,
        tie=0.01,
        faults=2,
        leave=0.3,
        kinds=("host_killed", "server_killed"),
    )
    report = soak.run(tmp_path)
    assert report["wrong"] == []
    assert report["answers"] == report["as_alone"] + report["near_ties"] == 12
    assert report["faults"] == {"host_killed": 1, "server_killed": 1}
    assert report["starts"] == 2
    assert set(report["end_s"]) == {"server_killed"}  # in tenths of a second, and a kill may take none
    assert report["end_s"]["server_killed"] < 60
    assert report["failures"]["client left"] > 0


def test_an_answer_that_is_no_turn_of_the_log_is_lost() -> None:
    logged = {key_of(TOLD): [LoggedTurn((1,) * 20, 4, [5, 6, 7])]}
    assert missing([TOLD], logged) == []
    assert missing([TOLD, replace(TOLD, turn=1)], logged) == ["c0 turn 1"]
    assert missing([replace(TOLD, cached_tokens=5)], logged) == ["c0 turn 0"]
    assert missing([replace(TOLD, text="test")], logged) == ["c0 turn 0"]


def test_an_answer_that_nobody_gives_alone_is_different() -> None:
    prompt = tuple(range(3, 23))
    alone = Alone(model_file(), "llama", SessionConfig(n_ctx=256), 6, {key_of(TOLD): [LoggedTurn(prompt, 4)]})
    alone.compare([TOLD], tie=0.01)
    assert alone.equal == alone.near_ties == 0
    assert "its prompt was another's" in alone.different[0]


def test_only_a_runner_up_within_the_tie_is_one() -> None:
    choices = [TokenChoice(1, "a", -0.1), TokenChoice(2, "b", -0.5, ((2, "b", -0.5), (3, "c", -0.52), (4, "d", -3.0)))]
    assert is_near_tie(choices, "ac and so on", 0.05)
    assert not is_near_tie(choices, "ac and so on", 0.01)
    assert not is_near_tie(choices, "ad and so on", 0.05)
    assert not is_near_tie(choices, "ax", 0.05)
    assert not is_near_tie(choices, "c", 0.05)


@given(st.integers(0, 99), st.integers(1, 20), st.integers(60, 200))
def test_a_plan_has_every_kind_as_often_and_strikes_before_the_end(seed: int, n: int, turns: int) -> None:
    plan = plan_faults(seed, n, turns)
    counts = [list(plan.values()).count(kind) for kind in FAULTS]
    assert sum(counts) == n
    assert max(counts) - min(counts) <= 1
    assert all(1 <= at < turns for at in plan)
    assert plan == plan_faults(seed, n, turns)


def test_growth_is_that_of_the_second_half_of_the_longest_life() -> None:
    mib = 1 << 20
    starts = [[(0, 900 * mib), (1, 900 * mib)], [], [(t, (100 + 9 * min(t, 4) + t) * mib) for t in range(9)]]
    told = memory(starts)
    assert told["rss_kib_per_turn"] == pytest.approx(1024)
    assert (told["rss_mib_middle"], told["rss_mib_end"], told["rss_mib_peak"]) == (140, 144, 900)
    assert told["turns_of_tail"] == 4


@pytest.mark.parametrize(
    ("faults", "turns", "kib"), [(0, 400.0, 20.0), (0, 400.0, 9.0), (0, 90.0, 20.0), (3, 400.0, 20.0)]
)
def test_a_long_life_without_faults_must_end_flat(faults: int, turns: float, kib: float) -> None:
    soak = Soak(model_file(), "llama", 1, 1, 1, 1, 1, 1, 1, 0.0, faults=faults, most_kib_per_turn=10.0)
    wrong = soak.grown({"turns_of_tail": turns, "rss_kib_per_turn": kib})
    assert bool(wrong) is (not faults and turns > 100 and kib > 10)


def test_percentiles_are_nearest_ranks() -> None:
    assert percentiles([float(i) for i in range(1, 101)] + [float("nan")]) == {"p50": 50.0, "p95": 95.0}
