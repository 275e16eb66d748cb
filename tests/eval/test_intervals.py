"""Intervals: known values, and what must hold for any."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.eval.intervals import batch_means, wilson


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [
        # Newcombe 1998, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_wilson_is_the_published_interval(hits: int, n: int, low: float, high: float) -> None:
    assert wilson(hits, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_share_and_mirrors(pair: tuple[int, int]) -> None:
    hits, n = pair
    low, high = wilson(hits, n)
    assert 0 <= low <= hits / n <= high <= 1
    assert low < high
    assert (1 - high, 1 - low) == pytest.approx(wilson(n - hits, n))
    # Four times as many trials say it better.
    wider = wilson(4 * hits, 4 * n)
    assert wider[1] - wider[0] < high - low


def test_no_trials_say_nothing_and_impossible_ones_are_refused() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="3 of 2"):
        wilson(3, 2)


def test_batch_means_of_known_batches() -> None:
    mean, low, high = batch_means([1.0, 3.0, 4.0, 6.0, 7.0, 9.0], 2)
    assert mean == 5.0
    # Batches 2, 5, 8: their deviation is 3.
    assert (low, high) == pytest.approx((5 - 1.959964 * 3 / math.sqrt(3), 5 + 1.959964 * 3 / math.sqrt(3)))


def test_a_rest_counts_in_the_mean_and_one_batch_gives_no_interval() -> None:
    assert batch_means([1.0, 1.0, 1.0, 1.0, 6.0], 2)[0] == 2.0
    mean, low, high = batch_means([1.0, 2.0, 3.0], 2)
    assert mean == 2.0
    assert math.isnan(low)
    assert math.isnan(high)
    with pytest.raises(ValueError, match="no values"):
        batch_means([], 2)
