"""Retained attention mass and its clairvoyant bound, against weights of which every single one is known."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.sim.quality.bound import best_share
from kvtape.sim.quality.meter import TurnMass, turn_mass
from kvtape.sim.quality.retained import Seen, Weighed, piece_share, weigh
from support.attention_maps import Weights, attention_map, causal_weights, edges_of, piece


@dataclass(frozen=True)
class Kept:
    """A made-up run: `seen` tells of all queries of `weights`, `there[q, k]` whether query q found key k."""

    weights: Weights
    seen: list[Seen]
    there: np.ndarray

    def share(self, start: int, stop: int) -> float:
        """What the queries really found, one by one."""
        weights = self.weights.mean(axis=(0, 1))[start:stop]
        return float((weights * self.there[start:stop]).sum() / weights.sum())


@st.composite
def runs(draw: st.DrawFn, block: int | None = None) -> Kept:
    """Operations of random sizes; before each a random choice of what is left, whole blocks of it with `block`."""
    n = draw(st.integers(1, 24))
    cuts = sorted({0, n, *draw(st.lists(st.integers(1, n), max_size=5))})
    weights = causal_weights(n, seed=draw(st.integers(0, 3)))
    there = np.zeros((n, n), dtype=bool)
    seen = []
    for start, stop in pairwise(cuts):
        edges = edges_of(start, block or 1)
        kept = [(a, b) for a, b in pairwise(edges) if draw(st.booleans())]
        for q in range(start, stop):
            there[q, start : q + 1] = True
            for a, b in kept:
                there[q, a:b] = True
        seen.append(Seen(start, stop, np.array(kept, np.int64).reshape(-1, 2)))
    return Kept(weights, seen, there)


def parts(run: Kept, start: int, stop: int) -> list[Seen]:
    return [s.part(start, stop) for s in run.seen if s.start < stop and s.stop > start]


@settings(deadline=None)
@given(runs(), st.integers(1, 9), st.integers(1, 9))
def test_the_truth_lies_in_the_interval(run: Kept, every: int, block: int) -> None:
    n = run.weights.shape[2]
    for p in attention_map(run.weights, every=every, block=block).pieces:
        share = piece_share(weigh(p), parts(run, p.start, p.stop))
        assert share.queries == p.n_queries
        assert 0.0 <= share.low <= share.high <= 1.0
        assert share.low - 1e-6 <= run.share(p.start, p.stop) <= share.high + 1e-6
    whole = turn_mass(attention_map(run.weights, every=every, block=block).path(1, n), run.seen, n)
    assert whole is not None
    assert whole.queries == n
    assert whole.low - 1e-6 <= run.share(0, n) <= whole.high + 1e-6


@settings(deadline=None)
@given(runs(), st.data())
def test_of_a_part_of_a_piece_too(run: Kept, data: st.DataObject) -> None:
    n = run.weights.shape[2]
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start + 1, n))
    edges = edges_of(n, data.draw(st.integers(1, 9)))
    share = piece_share(weigh(piece(run.weights, 0, n, edges)), parts(run, start, stop))
    assert share.queries == stop - start
    assert share.low - 1e-6 <= run.share(start, stop) <= share.high + 1e-6


@settings(deadline=None)
@given(runs(block=4))
def test_it_is_exact_where_every_query_and_key_is_measured_apart(run: Kept) -> None:
    for p in attention_map(run.weights, every=1, block=1).pieces:
        share = piece_share(weigh(p), parts(run, p.start, p.stop))
        assert share.high - share.low < 1e-9
        assert share.low == pytest.approx(run.share(p.start, p.stop), abs=1e-6)


def test_a_chunk_that_is_there_in_part_counts_nothing_or_all() -> None:
    known = Weighed(8, 9, np.array([0, 4, 8]), np.array([4, 8, 9]), np.array([0.5, 0.3, 0.2]))
    share = piece_share(known, [Seen(8, 9, np.array([[0, 4], [5, 8]]))])
    assert (share.low, share.high) == (pytest.approx(0.7), pytest.approx(1.0))
    share = piece_share(known, [Seen(8, 9, np.array([[4, 8]]))])
    assert (share.low, share.high) == (pytest.approx(0.5), pytest.approx(0.5))


def test_the_best_takes_the_densest_chunks_first_and_the_last_in_part() -> None:
    known = Weighed(8, 9, np.array([0, 2, 6, 8]), np.array([2, 6, 8, 9]), np.array([0.3, 0.4, 0.1, 0.2]))
    assert best_share(known, 1) == pytest.approx(0.2)  # the query itself is a row
    assert best_share(known, 3) == pytest.approx(0.5)
    assert best_share(known, 5) == pytest.approx(0.7)
    assert best_share(known, 7) == pytest.approx(0.9)
    assert best_share(known, 9) == 1.0


@settings(deadline=None)
@given(runs(block=3), st.integers(1, 9), st.integers(1, 9), st.integers(0, 30))
def test_nothing_keeps_more_than_the_bound(run: Kept, every: int, block: int, rows: int) -> None:
    n = run.weights.shape[2]
    path = attention_map(run.weights, every=every, block=block).path(1, n)
    found = turn_mass(path, run.seen, rows)
    assert found is not None
    assert found.low <= found.best + 1e-9
    # Also of a stretch of the queries, cut anywhere.
    for start, stop in pairwise(sorted({0, n // 3, n // 2, n})):
        stretch = turn_mass(path, parts(run, start, stop), rows)
        assert stretch is not None
        assert stretch.low <= stretch.best + 1e-9


@settings(deadline=None)
@given(st.integers(1, 24), st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_the_bound_rises_with_the_budget_and_is_all_where_the_tape_fits(
    n: int, every: int, block: int, seed: int
) -> None:
    for p in attention_map(causal_weights(n, seed=seed), every=every, block=block).pieces:
        found = [best_share(weigh(p), rows) for rows in range(n + 2)]
        assert found == sorted(found)
        assert found[p.stop] == 1.0
        assert all(0.0 <= share <= 1.0 for share in found)


def test_what_was_not_recorded_has_no_account() -> None:
    weights = causal_weights(8)
    path = attention_map(weights, every=2, turns=[4, 8]).path(1, 4)
    nothing = np.empty((0, 2), np.int64)
    assert turn_mass(path, [Seen(0, 4, nothing)], 8) is not None
    assert turn_mass(path, [Seen(0, 6, nothing)], 8) is None
    assert turn_mass(path, [], 8) == TurnMass(0, 1.0, 1.0, 1.0)
