"""Choosing layers: planted ones are found, and what is measured is what the definition says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.errors import UsageError
from kvtape.backends.protocol import AttentionMass
from kvtape.eval.layers import LayerRun, ProbedPrompt, best_runs, choose_layers, least_run, margins, probed
from kvtape.eval.places import Regions


def planted(n_layers: int, first: int, last: int, seed: int) -> ProbedPrompt:
    """Layers `first` to `last` look at the fact, the others anywhere."""
    rng = np.random.default_rng(seed)
    scores = rng.uniform(0.5, 1.5, (n_layers, 20))
    needle = np.zeros(20, dtype=np.bool_)
    needle[rng.integers(0, 19)] = True
    scores[first : last + 1, needle] += 8
    return ProbedPrompt(scores, needle)


@given(st.integers(8, 32), st.data())
def test_planted_layers_are_found(n_layers: int, data: st.DataObject) -> None:
    width = least_run(n_layers)
    first = data.draw(st.integers(0, n_layers - width))
    prompts = [planted(n_layers, first, first + width - 1, seed) for seed in range(6)]
    best = choose_layers(prompts)[0]
    assert (best.first, best.last) == (first, first + width - 1)
    assert best.first_share == 1.0


@given(st.integers(1, 6), st.integers(2, 9), st.integers(0, 2**32))
def test_a_margin_is_the_worst_block_of_the_fact_over_the_best_other(n_layers: int, n_blocks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    needle = np.zeros(n_blocks, dtype=np.bool_)
    needle[rng.permutation(n_blocks)[: rng.integers(1, n_blocks)]] = True
    prompt = ProbedPrompt(rng.uniform(0.1, 1, (n_layers, n_blocks)), needle)
    found = margins(prompt)
    for a in range(n_layers):
        for b in range(a, n_layers):
            sums = prompt.scores[a : b + 1].sum(axis=0)
            assert found[a, b] == pytest.approx(np.log2(sums[needle].min() / sums[~needle].max()))


def test_a_run_is_no_shorter_than_a_quarter() -> None:
    assert [least_run(n) for n in (1, 3, 4, 30, 32)] == [1, 1, 1, 7, 8]
    runs = choose_layers([planted(30, 18, 18, seed) for seed in range(4)])
    assert min(run.last - run.first + 1 for run in runs) == 7
    assert runs[0].first <= 18 <= runs[0].last
    assert runs[0].text == f"{runs[0].first}-{runs[0].last}"


def test_the_run_of_all_layers_stands_behind_the_best_for_comparison() -> None:
    runs = [LayerRun(2, 4, 3.0, 1.0), LayerRun(1, 4, 2.0, 1.0), LayerRun(0, 5, 0.5, 0.2), LayerRun(0, 3, 0.1, 0.1)]
    assert [run.text for run in best_runs(runs, 2)] == ["2-4", "1-4", "0-5"]
    assert best_runs(runs, 3) == runs[:3]
    assert best_runs(runs, 9) == runs


def measured(mass: np.ndarray) -> AttentionMass:
    n = mass.shape[1]
    return AttentionMass(np.arange(n), tuple(range(len(mass))), 4, mass.astype(np.float32), mass.astype(np.float32))


def test_blocks_between_sink_and_recent_are_means_of_their_tokens() -> None:
    mass = np.arange(200, dtype=np.float64)[None, :].repeat(2, axis=0)
    found = probed(measured(mass), (70, 101), 32, Regions(4, 20, 4, 20))
    # Blocks from 32, 64, 96, 128 and 160, the last one whole although the recent span begins inside it.
    assert found.scores.shape == (2, 5)
    assert found.scores[0].tolist() == [47.5, 79.5, 111.5, 143.5, 175.5]
    assert found.needle.tolist() == [False, True, True, False, False]


def test_a_short_prompt_has_nothing_to_tell_apart() -> None:
    with pytest.raises(UsageError, match="raise --tokens"):
        probed(measured(np.ones((2, 60))), (40, 50), 32, Regions(4, 20, 4, 20))
