"""From attention mass to block scores, and which layers count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.planner.blocks import Block, CacheClass
from kvtape.planner.grammar import SpecError
from kvtape.planner.layer_choice import canonical_layers, late_layers, read_layers
from kvtape.planner.plan_errors import BadScore
from kvtape.planner.ranked import plan_scored
from kvtape.planner.scores import MassHistory, ScoreRequest, pool_scores, score_blocks, sum_layers


def block(start: int, stop: int) -> Block:
    return Block(start, start, stop, "user", CacheClass.VOLATILE)


def at(*positions: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(positions, dtype=np.int64)


# -- layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "layers", "canonical"),
    [
        ("all", None, "all"),
        ("late", None, "late"),
        ("17-23", tuple(range(17, 24)), "17-23"),
        ("7+14+21", (7, 14, 21), "7+14+21"),
        ("3+0-2+17", (0, 1, 2, 3, 17), "0-3+17"),
        ("5-5", (5,), "5"),
    ],
)
def test_layers_are_read_and_written(text: str, layers: tuple[int, ...] | None, canonical: str) -> None:
    assert read_layers(text) == layers
    assert canonical_layers(text) == canonical


@given(st.sets(st.integers(0, 60), min_size=1))
def test_any_layers_have_one_text(layers: set[int]) -> None:
    text = canonical_layers("+".join(map(str, sorted(layers, reverse=True))))
    assert read_layers(text) == tuple(sorted(layers))
    assert canonical_layers(text) == text


@pytest.mark.parametrize("text", ["", "all+3", "1-", "-1", "3-1", "1,2", "1+1", "1-3+2", "٣", "99999"])
def test_other_text_is_no_choice_of_layers(text: str) -> None:
    with pytest.raises(SpecError, match="layers="):
        read_layers(text)


def test_late_layers_are_the_measured_ones_at_any_depth() -> None:
    assert late_layers(30) == tuple(range(16, 23))
    assert late_layers(28) == tuple(range(14, 22))
    assert [late_layers(n) for n in (1, 2, 3)] == [(0,), (1,), (1, 2)]
    assert ScoreRequest("window", 1, late=True).wanted(range(30)) == tuple(range(16, 23))
    assert ScoreRequest("window", 1, (2, 3)).wanted(range(30)) == (2, 3)
    assert ScoreRequest("window", 1).wanted(range(30)) is None


@given(st.integers(1, 200))
def test_late_layers_are_in_the_model_and_never_none(n: int) -> None:
    layers = late_layers(n)
    assert layers
    assert set(layers) <= set(range(n))


# -- tokens -------------------------------------------------------------------------------------------------------


def test_layers_are_summed() -> None:
    mass = np.array([[1, 2, 3], [10, 20, 30], [100, 200, 300]], dtype=np.float32)
    assert sum_layers(mass, (0, 4, 9), None).tolist() == [111, 222, 333]
    assert sum_layers(mass, (0, 4, 9), (0, 9)).tolist() == [101, 202, 303]
    with pytest.raises(BadScore, match=r"layers \[5\] were not measured; the model gave layers \[0, 4, 9\]"):
        sum_layers(mass, (0, 4, 9), (4, 5))
    with pytest.raises(BadScore, match=r"shape \(3, 3\) for 2 layers"):
        sum_layers(mass, (0, 4), None)
    mass[1, 2] = np.nan
    assert sum_layers(mass, (0, 4, 9), (0,)).tolist() == [1, 2, 3], "a layer that does not count may hold anything"
    with pytest.raises(BadScore, match="row 2 has a mass that is not finite"):
        sum_layers(mass, (0, 4, 9), None)


def test_pooling_averages_over_neighbours_with_zeros_outside() -> None:
    scores = np.array([3.0, 0, 0, 6, 0])
    assert pool_scores(scores, 1).tolist() == scores.tolist()
    assert pool_scores(scores, 3).tolist() == [1, 1, 2, 2, 2]
    assert pool_scores(scores, 7).tolist() == pytest.approx([9 / 7, 9 / 7, 9 / 7, 9 / 7, 6 / 7])
    assert pool_scores(scores, 2**31 - 1) == pytest.approx(np.full(5, 9 / (2**31 - 1))), "and takes no memory for it"
    assert pool_scores(np.zeros(0), 3).size == 0
    for pool in (0, 2, -1):
        with pytest.raises(BadScore, match="odd"):
            pool_scores(scores, pool)


def test_a_block_has_the_mean_of_its_scored_tokens() -> None:
    positions, scores = at(0, 1, 2, 3, 8, 9), np.array([1.0, 3, 5, 7, 2, 4])
    found = score_blocks([block(8, 12), block(0, 4), block(4, 8), block(12, 16), block(3, 9)], positions, scores)
    assert [b.score for b in found] == [3, 4, None, None, 4.5]
    assert score_blocks([], positions, scores) == ()
    assert score_blocks([block(0, 4)], at(), np.zeros(0))[0].score is None


@given(st.lists(st.floats(0, 1e6), min_size=4, max_size=4), st.lists(st.floats(0, 1e9), max_size=9))
def test_equal_blocks_score_equal_wherever_they_are(one: list[float], before: list[float]) -> None:
    scores = np.array([*before, *one, *one])
    n = len(before)
    left, right = score_blocks([block(n, n + 4), block(n + 4, n + 8)], np.arange(n + 8), scores)
    assert left.score == right.score


@pytest.mark.parametrize("positions", [at(0, 1, 2), at(1, 1), at(3, 2)])
def test_rows_must_fit(positions: Any) -> None:
    with pytest.raises(BadScore):
        score_blocks([block(0, 4)], positions, np.zeros(2))


# -- over time ----------------------------------------------------------------------------------------------------


def test_a_history_adds_up_and_knows_who_could_see_whom() -> None:
    """Four tokens, then two more after position 1 was evicted; it comes back for the last."""
    first = MassHistory().add(at(0, 1, 2, 3), np.array([4.0, 3, 2, 1]), n_queries=4, tape_length=4)
    assert first.queries.tolist() == [4, 3, 2, 1]
    second = first.add(at(0, 2, 3, 4, 5), np.array([1.0, 1, 1, 1, 1]), n_queries=2, tape_length=6)
    assert second.mass.tolist() == [5, 3, 3, 2, 1, 1]
    assert second.queries.tolist() == [6, 3, 4, 3, 2, 1]
    third = second.add(at(*range(7)), np.ones(7), n_queries=1, tape_length=7)
    assert third.scores(at(1, 5), "sum").tolist() == [4, 2]
    assert third.scores(at(1, 5), "mean").tolist() == [1, 1]
    assert first.mass.tolist() == [4, 3, 2, 1], "a history is not changed"
    cut = third.truncate(2)
    assert cut.mass.tolist() == [6, 4]
    with pytest.raises(BadScore, match="reach to 5, the history to 2"):
        cut.scores(at(1, 5), "sum")
    assert cut.add(at(2), np.ones(1), 1, 3).scores(at(2), "sum").tolist() == [1], "a new token begins at nothing"


def test_what_no_query_could_see_scores_zero() -> None:
    history = MassHistory().add(at(0), np.ones(1), n_queries=1, tape_length=3)
    assert history.scores(at(0, 2), "mean").tolist() == [1, 0]


@pytest.mark.parametrize(("positions", "n"), [(at(0, 1), 3), (at(5), 1), (at(-1), 1)])
def test_a_history_takes_only_what_fits(positions: Any, n: int) -> None:
    with pytest.raises(BadScore):
        MassHistory().add(positions, np.ones(n), 1, 5)


def test_f44_sum_starves_the_young_and_mean_does_not() -> None:
    """64 tokens, budget 16. Every query pays each row 1/1024, every eighth row 1/256, the sink the rest."""
    n = 64
    share = np.where(np.arange(n) % 8 == 0, 1 / 256, 1 / 1024)
    paid = np.tril(np.broadcast_to(share, (n, n)))
    paid[:, 0] += 1 - paid.sum(axis=1)
    history = MassHistory().add(np.arange(n), paid.sum(axis=0), n, n)
    plans = {}
    for norm in ("sum", "mean"):
        blocks = score_blocks([block(p, p + 1) for p in range(n)], np.arange(n), history.scores(np.arange(n), norm))
        plans[norm] = plan_scored(blocks, budget=16, recent=4, can_score=True, can_evict=True)
    kept = {norm: [p for r in found.keep for p in range(r.start, r.stop)] for norm, found in plans.items()}
    assert set(range(0, 64, 8)) <= set(kept["mean"]), "what is attended to stays, also the young"
    assert 56 not in kept["sum"]
    assert plans["sum"].starved > 0
    assert plans["mean"].starved == 0


def test_f45_whole_prompt_and_last_window_are_two_policies() -> None:
    """One attention matrix, scored by all queries and by the last two: other tokens stay."""
    n = 12
    paid = np.tril(np.ones((n, n)))
    paid[-2:, 5] = 9
    paid[2:6, 1] = 9
    paid /= paid.sum(axis=1, keepdims=True)
    kept = {}
    for name, queries in (("accumulated", slice(None)), ("window", slice(n - 2, None))):
        blocks = score_blocks([block(p, p + 1) for p in range(n)], np.arange(n), paid[queries].sum(axis=0))
        found = plan_scored(blocks, budget=4, recent=2, can_score=True, can_evict=True)
        kept[name] = [p for r in found.keep for p in range(r.start, r.stop)]
    assert kept == {"accumulated": [0, 1, 10, 11], "window": [5, 9, 10, 11]}
