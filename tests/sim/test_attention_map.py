"""The attention map of a session: which pieces are in force, and sums over them, against weights that are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.sim.errors import SimulationError
from kvtape.sim.quality.attention import AttentionMap
from support.attention_maps import attention_map, causal_weights, piece, pieces


@given(st.integers(1, 30), st.integers(1, 7), st.integers(1, 7), st.integers(0, 5))
def test_accumulated_attention_is_the_sum_over_all_queries(n: int, every: int, block: int, seed: int) -> None:
    weights = causal_weights(n, seed=seed)
    path = attention_map(weights, every=every, block=block).path(1, n)
    assert path.complete
    for until in path.borders.tolist()[1:]:
        sums = path.accumulated(until)
        assert sums.n_queries == until
        assert sums.starts[0] == 0
        assert sums.stops[-1] == until
        wanted = weights[:, :, :until].sum(axis=(1, 2))
        for i, (a, b) in enumerate(zip(sums.starts, sums.stops, strict=True)):
            np.testing.assert_allclose(sums.mass[:, i], wanted[:, a:b].sum(axis=1), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(sums.mass.sum(axis=1), 3 * until, rtol=1e-5)


def test_chunks_are_as_fine_as_the_pieces_and_no_finer() -> None:
    weights = causal_weights(12)
    coarse = piece(weights, 0, 8, [0, 8])
    fine = piece(weights, 8, 12, [0, 4, 8, 10, 12])
    path = AttentionMap("s0", (0, 1), (coarse, fine)).path(1, 12)
    assert path.accumulated().starts.tolist() == [0, 8, 10]
    assert path.window(4).starts.tolist() == [0, 4, 8, 10]


@given(st.integers(2, 24), st.integers(1, 5), st.data())
def test_a_window_has_the_last_queries_alone(n: int, every: int, data: st.DataObject) -> None:
    weights = causal_weights(n)
    path = attention_map(weights, every=every).path(1, n)
    start = data.draw(st.sampled_from(path.borders.tolist()[:-1]))
    got = path.window(n - start)
    assert got.n_queries == n - start
    wanted = weights[:, :, start:].sum(axis=(1, 2))
    merged = np.add.reduceat(wanted, got.starts, axis=-1)
    np.testing.assert_allclose(got.mass, merged, rtol=1e-5, atol=1e-6)


def test_peaks_add_up_to_an_upper_bound() -> None:
    weights = causal_weights(16)
    sums = attention_map(weights, every=4, block=1).path(1, 16).accumulated()
    peak = weights.sum(axis=2).max(axis=1)
    assert (sums.peak >= peak * (1 - 1e-6)).all()
    assert (sums.peak <= sums.mass * (1 + 1e-6)).all()


def test_what_was_not_measured_apart_is_refused() -> None:
    path = attention_map(causal_weights(12), every=4).path(1, 12)
    for ask in (lambda: path.accumulated(6), lambda: path.window(3), lambda: path.window(4, until=11)):
        with pytest.raises(SimulationError, match=r"--score-every 1"):
            ask()
    assert path.window(400).n_queries == 12


def test_a_tape_that_was_cut_and_grew_again_has_the_new_pieces_in_force() -> None:
    old, new = causal_weights(12, seed=1), causal_weights(14, seed=2)
    first = pieces(old, 0, 12, turn=1)
    again = replace(piece(new, 4, 6, [0, 4, 6], turn=2, seq=10), repeated=True)
    grown = [piece(new, 6, 10, [0, 4, 6, 10], turn=2, seq=11), piece(new, 10, 14, [0, 4, 6, 10, 14], turn=2, seq=12)]
    found = AttentionMap("s0", (0, 1), (*first, again, *grown))
    assert [p.seq for p in found.path(1, 12).pieces] == [0, 1, 2]
    path = found.path(2, 14)
    assert [p.seq for p in path.pieces] == [0, 10, 11, 12]
    assert path.complete
    assert [p.seq for p in path.computed(6, 14)] == [11, 12]
    assert [p.seq for p in path.computed(5, 7)] == [10, 11]
    assert found.path(9, 14).complete  # a later turn that computed nothing


def test_a_shorter_tape_is_complete_where_a_piece_ends() -> None:
    found = attention_map(causal_weights(12), every=4)
    assert found.complete(1, 8)
    assert found.path(1, 8).covered == 8
    assert not found.complete(1, 7)
    assert found.path(1, 7).covered == 4
    assert not found.complete(1, 13)
    assert not found.complete(0, 4)
    assert found.complete(0, 0)


def test_a_gap_in_the_pieces_ends_what_is_covered() -> None:
    whole = attention_map(causal_weights(12), every=4)
    holed = AttentionMap("s0", (0, 1), (whole.pieces[0], whole.pieces[2]))
    assert holed.path(1, 12).covered == 4


def test_a_turn_that_went_on_twice_cannot_be_told_apart_behind_the_fork() -> None:
    weights = causal_weights(12)
    twice = (*pieces(weights, 0, 12), *pieces(weights, 8, 12, seq=5))
    found = AttentionMap("s0", (0, 1), twice)
    assert found.path(1, 8).complete
    assert found.complete(1, 12)
    with pytest.raises(SimulationError, match="tape position 8"):
        found.path(1, 12)
    later = tuple(replace(p, turn=2) for p in pieces(weights, 12, 12))
    assert AttentionMap("s0", (0, 1), twice + later).path(2, 12).complete


def test_a_piece_that_does_not_cover_the_tape_before_it_is_refused() -> None:
    good = piece(causal_weights(8), 4, 8, [0, 4, 8])
    for bad in (
        replace(good, starts=good.starts[1:], stops=good.stops[1:]),
        replace(good, starts=np.array([0, 5])),
        replace(good, stop=9),
        replace(good, start=8),
        replace(good, mass=good.mass[:1]),
        replace(good, peak=good.peak[:, :1]),
    ):
        with pytest.raises(SimulationError, match="does not cover"):
            AttentionMap("s0", (0, 1), (bad,))


def test_the_path_before_an_event_is_one_whatever_the_turn_did() -> None:
    weights, other = causal_weights(12, seed=1), causal_weights(12, seed=2)
    side = pieces(weights, 0, 8, seq=0), pieces(weights, 8, 12, seq=5), pieces(other, 8, 12, seq=9)
    there = AttentionMap("s0", (0, 1), tuple(p for group in side for p in group))
    assert there.path_before(9, 12).pieces == (*side[0], *side[1])
    assert there.path_before(10, 12).pieces == (*side[0], *side[2])
    assert there.path_before(5, 12).covered == 8
    with pytest.raises(SimulationError, match="went on twice"):
        there.path(1, 12)
