"""The gate's statistics on planted data: no effect is not let through, a planted one is found, at the stated rates."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.eval.gate.effect import LEAST_CONVERSATIONS, Effect, effect_of
from kvtape.eval.gate.order import plain_first
from kvtape.eval.gate.verdict import MARGIN
from kvtape.eval.intervals import Z_95, student, t_95

pytestmark = pytest.mark.contract("I7")

Times = list[tuple[int, int, int]]
TIMES = st.lists(
    st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 10**9)), min_size=1, max_size=4), min_size=1, max_size=8
).map(lambda groups: [(number, a, b) for number, group in enumerate(groups) for a, b in group])


@pytest.mark.parametrize(
    # Fisher and Yates, table III, as every textbook prints it.
    ("freedom", "point"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (7, 2.365), (10, 2.228), (11, 2.201), (30, 2.042), (120, 1.980)],
)
def test_the_points_of_student_are_the_published_ones(freedom: int, point: float) -> None:
    assert t_95(freedom) == pytest.approx(point, abs=5e-4)


@given(st.integers(1, 300))
def test_more_values_say_it_better_and_never_better_than_the_normal(freedom: int) -> None:
    assert t_95(freedom) > t_95(freedom + 1) > Z_95


def test_a_known_mean_and_its_interval() -> None:
    mean, low, high = student([1.0, 2.0, 3.0, 4.0])
    half = 3.182446 * math.sqrt(5 / 3 / 4)
    assert (mean, low, high) == pytest.approx((2.5, 2.5 - half, 2.5 + half), abs=1e-5)
    assert student([7.0])[0] == 7.0
    assert all(math.isnan(x) for x in student([7.0])[1:])
    with pytest.raises(ValueError, match="no values"):
        student([])
    with pytest.raises(ValueError, match="0 degrees"):
        t_95(0)


def test_an_exact_fifth_is_a_fifth() -> None:
    effect = effect_of([(c, 1000 * (c + 1), 800 * (c + 1)) for c in range(5)])
    assert (effect.saved, effect.low, effect.high) == pytest.approx((0.2, 0.2, 0.2))
    assert effect.beyond(MARGIN)
    assert not effect.is_loss


@given(TIMES)
def test_the_interval_holds_the_effect_and_units_do_not_matter(times: Times) -> None:
    effect = effect_of(times)
    assert effect.saved < 1
    if effect.conversations < LEAST_CONVERSATIONS:
        assert math.isnan(effect.low)
        assert not effect.beyond(-math.inf)
        assert not effect.is_loss
    else:
        assert effect.low <= effect.saved <= effect.high or effect.low == pytest.approx(effect.high)
    again = effect_of([(c, 7 * a, 7 * b) for c, a, b in times])
    assert again.saved == pytest.approx(effect.saved)


@given(TIMES)
def test_the_other_way_round_it_is_the_inverse(times: Times) -> None:
    effect, other = effect_of(times), effect_of([(c, b, a) for c, a, b in times])
    assert (1 - effect.saved) * (1 - other.saved) == pytest.approx(1)


def test_turns_of_one_conversation_are_one_value() -> None:
    whole = effect_of([(c, 300 + c, 200) for c in range(6)])
    cut = effect_of([(c, part, 50) for c in range(6) for part in (100, 100, 60, 40 + c)])
    assert (cut.saved, cut.low) == pytest.approx((whole.saved, whole.low))


@pytest.mark.parametrize("times", [[], [(0, 0, 5)], [(0, 5, 5), (1, 5, 0)]])
def test_no_time_is_no_effect(times: Times) -> None:
    with pytest.raises(ValueError, match=r"no values|took no time"):
        effect_of(times)


def _draws(seed: int, runs: int, conversations: int, factor: float, noise: float, tail: float) -> list[Effect]:
    """Planted runs: turns of unequal length, noise that multiplies, and with probability `tail` a turn of either arm
    that takes three times as long."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(runs):
        base = rng.uniform(1e6, 4e6, (conversations, 4))
        slow = np.where(rng.random((2, conversations, 4)) < tail, 3.0, 1.0)
        a, b = (
            base * share * np.exp(noise * rng.standard_normal(base.shape)) * slow[i]
            for i, share in enumerate((1.0, factor))
        )
        found.append(effect_of((c, int(a[c, t]), int(b[c, t])) for c in range(conversations) for t in range(4)))
    return found


@pytest.mark.parametrize("conversations", [4, 8, 16])
@pytest.mark.parametrize("tail", [0.0, 0.02])
def test_what_saves_no_more_than_the_margin_is_let_through_in_one_of_forty_at_most(
    conversations: int, tail: float
) -> None:
    runs = 1000
    edge = sum(e.beyond(MARGIN) for e in _draws(1, runs, conversations, 1 - MARGIN, 0.1, tail))
    # 2.5 %, and three standard errors of a share of so many runs.
    assert edge / runs <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / runs)
    none = sum(e.beyond(MARGIN) for e in _draws(2, runs, conversations, 1.0, 0.1, tail))
    assert none <= edge
    assert none / runs <= 0.01


def test_at_the_margin_itself_the_rate_is_the_stated_one() -> None:
    # Else the test above could pass because nothing is ever let through.
    edge = sum(e.beyond(MARGIN) for e in _draws(3, 2000, 8, 1 - MARGIN, 0.1, 0.0))
    assert 0.015 <= edge / 2000 <= 0.035


def test_a_planted_fifth_is_found_and_a_planted_loss_is_seen() -> None:
    found = _draws(4, 300, 8, 0.8, 0.1, 0.0)
    assert sum(e.beyond(MARGIN) for e in found) >= 0.98 * 300
    assert 0.92 * 300 <= sum(e.low <= 0.2 <= e.high for e in found) <= 0.98 * 300
    lost = _draws(5, 300, 8, 1.25, 0.1, 0.0)
    assert sum(e.is_loss for e in lost) >= 0.98 * 300
    assert not any(e.beyond(MARGIN) for e in lost)
    # Where one turn in fifty takes three times as long it takes more conversations.
    rough = [sum(e.beyond(MARGIN) for e in _draws(6, 300, n, 0.8, 0.1, 0.02)) for n in (8, 24)]
    assert rough[0] >= 0.5 * 300
    assert rough[1] >= 0.95 * 300


@given(st.integers(0, 2**32))
def test_each_block_of_two_has_each_order_once(seed: int) -> None:
    order = plain_first(seed)
    drawn = [next(order) for _ in range(40)]
    assert all(drawn[i] != drawn[i + 1] for i in range(0, 40, 2))
    again = plain_first(seed)
    assert [next(again) for _ in range(40)] == drawn


def test_blocks_of_both_kinds_are_drawn() -> None:
    order = plain_first(0)
    first = [next(order) for _ in range(400)][::2]
    assert 70 <= sum(first) <= 130


def test_a_drift_weighs_on_both_arms_alike() -> None:
    """A machine that slows down steadily, twofold over the run: without balance the second arm would pay for it."""
    order = plain_first(3)
    at, times = 0, []
    for conversation in range(16):
        for _ in range(4):
            costs = {}
            for is_plain in (True, False) if next(order) else (False, True):
                costs[is_plain] = round(1e6 * (1 + at / 128))
                at += 1
            times.append((conversation, costs[True], costs[False]))
    effect = effect_of(times)
    assert abs(effect.saved) < 0.001
    after = [(i // 4, round(1e6 * (1 + i / 64)), round(1e6 * (1 + (i + 0.5) / 64))) for i in range(64)]
    assert effect_of(after).saved < -0.004
