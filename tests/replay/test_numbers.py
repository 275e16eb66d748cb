"""KL and top-1 of logits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.replay.numbers import Agreement, compare_logits, kl_nats, merge


def test_kl_of_two_coins() -> None:
    p, q = np.log(np.array([[0.5, 0.5]], np.float32)), np.log(np.array([[0.9, 0.1]], np.float32))
    want = 0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1)
    assert kl_nats(p, q)[0] == pytest.approx(want, abs=1e-6)


@given(st.integers(0, 1000), st.floats(-50, 50))
def test_kl_is_zero_for_equal_distributions_and_never_negative(seed: int, offset: float) -> None:
    logits = np.random.default_rng(seed).normal(size=(3, 20)).astype(np.float32)
    assert kl_nats(logits, logits + np.float32(offset)).max() < 1e-5
    assert kl_nats(logits, logits[:, ::-1].copy()).min() >= 0


def test_logits_that_are_not_numbers_are_infinitely_far() -> None:
    good = np.zeros((2, 4), np.float32)
    bad = good.copy()
    bad[1, 2] = np.nan
    found = compare_logits(good, bad)
    assert found is not None
    assert np.isinf(found.max_kl)


def test_merging_weighs_by_checkpoints() -> None:
    merged = merge([Agreement(1, 0.4, 0.4, 0.0), None, Agreement(3, 0.1, 0.0, 1.0)])
    assert merged == Agreement(4, 0.4, 0.1, 0.75)
    assert merge([None]) is None


def test_nothing_to_compare_is_none_and_other_shapes_an_error() -> None:
    assert compare_logits(np.empty((0, 4), np.float32), np.empty((0, 4), np.float32)) is None
    with pytest.raises(ValueError, match="logits"):
        compare_logits(np.zeros((1, 4), np.float32), np.zeros((1, 5), np.float32))
