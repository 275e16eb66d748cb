from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.logits import log_softmax
from kvtape.serve.requests import Sampling
from kvtape.serve.sampling import Sampler

LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40).map(lambda x: np.array(x, np.float32))


@given(LOGITS, st.integers(0, 2**63))
def test_temperature_zero_takes_the_most_likely_token(logits: np.ndarray, seed: int) -> None:
    assert Sampler(Sampling(0.0), seed).choose(logits) == int(logits.argmax())


@given(LOGITS, st.floats(0.1, 3), st.floats(0.01, 1), st.integers(0, 2**63))
def test_a_seed_repeats_and_stays_in_the_nucleus(
    logits: np.ndarray, temperature: float, top_p: float, seed: int
) -> None:
    one, other = (Sampler(Sampling(temperature, top_p), seed) for _ in range(2))
    chosen = [one.choose(logits) for _ in range(8)]
    assert chosen == [other.choose(logits) for _ in range(8)]
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    p /= p.sum()
    for token in chosen:
        more_likely = p[p > p[token]].sum()
        assert more_likely < top_p + 1e-9


@pytest.mark.parametrize("top_p", [1.0, 0.5, 5e-324])
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-10])
def test_the_smallest_temperatures_are_greedy(temperature: float, top_p: float) -> None:
    logits = np.array([-3.5, 12.25, 12.0, 30.0, -40.0], np.float32)
    assert [Sampler(Sampling(temperature, top_p), seed).choose(logits) for seed in range(4)] == [3] * 4


def test_draws_follow_the_distribution() -> None:
    p = np.array([0.5, 0.3, 0.15, 0.05])
    sampler = Sampler(Sampling(1.0), 7)
    drawn = np.bincount([sampler.choose(np.log(p).astype(np.float32)) for _ in range(20_000)], minlength=4) / 20_000
    assert np.abs(drawn - p).max() < 0.015
    nucleus = Sampler(Sampling(1.0, top_p=0.75), 7)
    drawn = np.bincount([nucleus.choose(np.log(p).astype(np.float32)) for _ in range(20_000)], minlength=4) / 20_000
    assert drawn[2:].sum() == 0
    assert drawn[0] == pytest.approx(0.625, abs=0.015)


@given(LOGITS)
def test_log_probabilities_sum_to_one(logits: np.ndarray) -> None:
    assert np.exp(log_softmax(logits)).sum() == pytest.approx(1)
