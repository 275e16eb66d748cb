"""Policies and their budgets: what a spec leaves out is filled in, and nothing else is touched."""

from __future__ import annotations

import pytest

from kvtape.backends.errors import UsageError
from kvtape.eval.candidates import candidates_of
from kvtape.eval.ranges import parse_range
from kvtape.planner.specs import SpecError, parse_policy


def made(*texts: str, budgets: tuple[int, ...] = ()) -> list[tuple[str, int | None]]:
    return [(c.label, c.budget) for c in candidates_of(texts, budgets)]


def test_dense_is_always_there_and_first() -> None:
    assert made() == [("none", None)]
    assert made("stream:sink=4,recent=60", "none") == [("none", None), ("stream:sink=4,recent=60", 64)]


def test_a_budget_goes_to_the_policies_that_name_none() -> None:
    got = made("stream", "stream:sink=0", "snapkv:sink=4", "class:budget=99", budgets=(64, 128))
    assert got[1:] == [
        ("stream:sink=4,recent=60", 64),
        ("stream:sink=4,recent=124", 128),
        ("stream:sink=0,recent=64", 64),
        ("stream:sink=0,recent=128", 128),
        ("snapkv:budget=64,sink=4", 64),
        ("snapkv:budget=128,sink=4", 128),
        ("class:budget=99", 99),
    ]


def test_the_same_policy_counts_once() -> None:
    assert made("stream:sink=4,recent=60", "stream:recent=60", budgets=(64,))[1:] == [("stream:sink=4,recent=60", 64)]


def test_random_draws_with_each_trials_seed_unless_it_has_its_own() -> None:
    _, free, fixed = candidates_of(["random:sink=4", "random:seed=7"], [64])
    assert free.label == "random:budget=64,sink=4,seed=trial"
    assert [free.policy_of(seed).seed for seed in (0, 3, 41)] == [0, 3, 41]
    assert fixed.label == "random:budget=64,seed=7"
    assert fixed.policy_of(3) == parse_policy("random:budget=64,seed=7")


def test_a_function_of_ones_own_takes_a_budget() -> None:
    assert made("json:loads", budgets=(64,))[1:] == [("json:loads,budget=64", 64)]


def test_dense_cuts_the_blocks_that_the_others_cut() -> None:
    assert made("class:budget=64,block=8")[0] == ("none:block=8", None)
    with pytest.raises(UsageError, match="block=8 and block=32: one evaluation cuts blocks of one size"):
        made("class:budget=64,block=8", "stream:sink=4,recent=9")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("stream", UsageError, "policy stream: names no budget; give one in the spec or with --budget"),
        ("snapkv:sink=4", UsageError, "policy snapkv:sink=4: names no budget"),
        ("strem", SpecError, "unknown policy 'strem', did you mean 'stream'"),
        ("stream:sink=x", SpecError, "'x' is not allowed"),
        ("h2o:budget=64", SpecError, "h2o needs recent="),
    ],
)
def test_what_cannot_be_understood(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        made(text)


def test_a_budget_must_leave_something_recent() -> None:
    with pytest.raises(UsageError, match="a budget of 4 leaves nothing recent beside sink=4"):
        made("stream", budgets=(4,))


@pytest.mark.parametrize("text", ["", "3", "3:", "a:b", "-1:2", "1:2:3", "٣:٤"])
def test_other_text_is_no_range(text: str) -> None:
    with pytest.raises(UsageError, match="write A:B"):
        parse_range("--seeds", text)


def test_ranges_are_half_open_and_not_empty() -> None:
    assert parse_range("--seeds", "3:5") == range(3, 5)
    with pytest.raises(UsageError, match="--seeds 5:5: the range is empty"):
        parse_range("--seeds", "5:5")
