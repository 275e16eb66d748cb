"""A/B turns on real sessions whose costs are planted, and the verdict over them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvtape.backends.errors import UsageError
from kvtape.eval.gate.smoke import LIMITS, Smoke, run_smoke
from kvtape.eval.gate.turns import Side, Turn, run_turns
from kvtape.eval.gate.verdict import MARGIN, NOT_HERE, THROUGH, Outcome, judge
from kvtape.eval.gate.workloads import WORKLOADS, own_chat, workload_named
from support.planted import PlantedArms

pytestmark = pytest.mark.contract("I7")

SMALL = replace(WORKLOADS["chat"], turns=2, answer=3)
GOOD = Smoke(checkpoints=64, kl=0.0, nll_delta=0.0, top1=1.0, used=4)


def asked(arms: PlantedArms, *, conversations: int = 4, threads: int = 1, smoke: Smoke = GOOD) -> Outcome:
    turns = run_turns(SMALL, conversations, arms, arms.meter(threads), arms.tokenize)
    return judge(turns, smoke, threads=threads)


def test_a_planted_fifth_is_let_through() -> None:
    outcome = asked(PlantedArms(factor=0.8, noise=0.05, seed=1))
    assert (outcome.verdict, outcome.parted, outcome.turns) == (THROUGH, 0, 8)
    assert outcome.cpu.low <= 0.2 <= outcome.cpu.high
    assert outcome.cpu.low >= MARGIN
    assert "of the turn time, at least 5 %" in outcome.reason


@settings(max_examples=6)
@given(st.integers(0, 2**16), st.floats(0.96, 1.3))
def test_what_saves_too_little_is_not_let_through(seed: int, factor: float) -> None:
    outcome = asked(PlantedArms(factor=factor, noise=0.01, seed=seed))
    assert outcome.verdict == NOT_HERE
    if factor > 1.05:
        assert outcome.reason.startswith("costs ")
        assert outcome.reason.endswith(" more time")


@settings(max_examples=20)
@given(st.integers(0, 2**16), st.floats(0.9, 1.1))
def test_a_doubtful_effect_is_told_as_what_its_mean_is(seed: int, factor: float) -> None:
    outcome = asked(PlantedArms(factor=factor, noise=0.4, seed=seed))
    low, saved, high = outcome.cpu.low, outcome.cpu.saved, outcome.cpu.high
    assume(low < MARGIN and high >= 0)
    assert outcome.reason.startswith("saves " if saved >= 0 else f"costs {-100 * saved:.1f} % more time, ")
    assert f"[{100 * low:.1f}, {100 * high:.1f}]" in outcome.reason
    assert outcome.reason.endswith("the whole interval must be at least 5 %")
    assert "saves -" not in outcome.reason


def test_both_arms_say_the_same_and_take_the_same_turns() -> None:
    arms = PlantedArms(factor=0.5)
    turns = run_turns(SMALL, 3, arms, arms.meter(), arms.tokenize)
    assert [(t.conversation, t.number) for t in turns] == [(c, n) for c in range(3) for n in range(2)]
    assert all(t.plain.tokens == t.optimised.tokens and len(t.plain.tokens) == 3 for t in turns)
    assert [t.optimised.cpu_ns * 2 for t in turns] == pytest.approx([t.plain.cpu_ns for t in turns], abs=2)
    assert arms.opened == [f"{c}-{arm}" for c in range(3) for arm in ("plain", "optimised")]
    assert [t.used for t in turns] == [1] * 6


def test_conversations_differ_and_a_seed_repeats_them() -> None:
    arms = PlantedArms()
    one, two, other = (run_turns(SMALL, 4, arms, arms.meter(), arms.tokenize, seed=s) for s in (1, 1, 2))
    # What is asked shows in what it costs: a token a word.
    spent = [[t.plain.cpu_ns for t in run] for run in (one, two, other)]
    assert spent[0] == spent[1] != spent[2]
    assert len(set(spent[0])) > 2
    assert [t.plain_first for t in one] == [t.plain_first for t in two]


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_every_workload_runs_as_it_says(name: str) -> None:
    workload = replace(workload_named(name), answer=3)
    arms = PlantedArms()
    turns = run_turns(workload, 2, arms, arms.meter(), arms.tokenize)
    assert len(turns) == 2 * workload.turns
    assert len(workload.draw(0, 0).messages) == workload.turns
    assert workload.draw(0, 0) != workload.draw(1, 0)
    assert workload.draw(0, 0) != workload.draw(0, 1)


def test_the_own_chat_is_named_by_what_it_says() -> None:
    said = [("system", "Be short."), ("user", "One?"), ("assistant", "No."), ("user", "Two?")]
    own = own_chat(said, 5)
    assert (own.turns, own.draw(3, 1).messages, own.draw(0, 0).system) == (2, ("One?", "Two?"), "Be short.")
    assert own.name == own_chat(said, 5).name != own_chat(said, 6).name
    assert own.name.startswith("chat-")
    with pytest.raises(UsageError, match="no user message"):
        own_chat(said[:1], 5)
    with pytest.raises(UsageError, match="choose one of chat, steps, rewrite"):
        workload_named("chess")


def test_other_tokens_are_never_let_through() -> None:
    outcome = asked(PlantedArms(factor=0.5, errs_at=1))
    assert outcome.verdict == NOT_HERE
    assert outcome.parted == outcome.turns
    assert outcome.reason == "other tokens were generated in 8 of 8 turns, first in turn 0 of conversation 0"


def test_what_never_came_into_play_is_not_let_through() -> None:
    assert "never came into play in 8 turns" in asked(PlantedArms(factor=0.5, uses=0)).reason
    assert "quality smoke" in asked(PlantedArms(factor=0.5), smoke=replace(GOOD, used=0)).reason


@pytest.mark.parametrize(
    ("worse", "why"),
    [
        ({"kl": 2 * LIMITS["kl"]}, "mean KL 0.02 is above 0.01"),
        ({"nll_delta": -0.03}, "NLL differs by -0.03, more than 0.02"),
        ({"kl": math.nan, "nll_delta": math.nan}, "mean KL nan is above 0.01"),
        ({"nll_delta": math.nan}, "NLL differs by +nan, more than 0.02"),
        ({"top1": 0.5}, "the likeliest token agrees in 0.500, less than 0.9"),
        ({"checkpoints": 0}, "nothing was generated to compare"),
        ({"parted": 1}, "other tokens were generated in 1 conversations of the quality smoke"),
    ],
)
def test_worse_quality_is_never_let_through(worse: dict[str, Any], why: str) -> None:
    outcome = asked(PlantedArms(factor=0.5), smoke=replace(GOOD, **worse))
    assert (outcome.verdict, outcome.reason) == (NOT_HERE, why)


def test_too_few_conversations_say_nothing() -> None:
    outcome = asked(PlantedArms(factor=0.5), conversations=3)
    assert (outcome.verdict, math.isnan(outcome.cpu.low)) == (NOT_HERE, True)
    assert outcome.reason == "3 conversations give no interval; at least 4 do"


@pytest.mark.parametrize(
    ("threads", "cpu", "wall", "verdict", "by"),
    [
        # One thread: others on the machine stretch the wall clock, and do not decide ...
        (1, 0.8, 1.0, THROUGH, "cpu"),
        # ... but a loss that the clock shows as a whole is heard.
        (1, 0.8, 1.2, NOT_HERE, "cpu"),
        (1, 1.0, 0.8, NOT_HERE, "cpu"),
        # Several: more work on more cores may still be less waiting.
        (2, 1.3, 0.8, THROUGH, "wall"),
        (2, 0.8, 1.0, NOT_HERE, "wall"),
    ],
)
def test_which_clock_decides(threads: int, cpu: float, wall: float, verdict: str, by: str) -> None:
    outcome = asked(PlantedArms(factor=cpu, wall_factor=wall, noise=0.02, seed=1), threads=threads)
    assert (outcome.verdict, outcome.decided_by) == (verdict, by), outcome.reason
    assert outcome.effect is (outcome.cpu if by == "cpu" else outcome.wall)
    assert outcome.why_decided


def test_the_smoke_compares_what_both_compute() -> None:
    same = run_smoke(SMALL, 2, PlantedArms(), PlantedArms.tokenize, seed=5)
    assert same == Smoke(checkpoints=4, kl=0.0, nll_delta=0.0, top1=1.0, used=4)
    assert same.problem is None
    longer = run_smoke(replace(SMALL, answer=9), 1, PlantedArms(), PlantedArms.tokenize, seed=5)
    assert longer.checkpoints == 2 * 3
    # The rest of a conversation is not compared once its tokens have parted.
    parted = run_smoke(SMALL, 2, PlantedArms(errs_at=2), PlantedArms.tokenize, seed=5)
    assert (parted.parted, parted.problem is None) == (2, False)


def test_the_smoke_sees_numbers_that_drift_while_the_tokens_are_the_same() -> None:
    bent = run_smoke(SMALL, 2, PlantedArms(blurs=0.5), PlantedArms.tokenize, seed=5)
    assert (bent.parted, bent.top1) == (0, 1.0)
    assert bent.kl > 0
    assert bent.nll_delta != 0
    assert "NLL differs" in (bent.problem or "") or "mean KL" in (bent.problem or "")


def test_a_tie_of_no_time_is_an_error_not_a_verdict() -> None:
    side = Side(0, 0, (1,))
    with pytest.raises(ValueError, match="took no time"):
        judge([Turn(0, 0, True, side, side, 1)], GOOD, threads=1)
