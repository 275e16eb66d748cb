"""What a modelled engine answers from recorded attention, against weights of which every single one is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.planner.layout import Layout, rank_layout
from kvtape.planner.ranges import RangeSet
from kvtape.sim.errors import NoAttention
from kvtape.sim.quality.attention import AttentionMap
from kvtape.sim.quality.recorded import RecordedAttention
from support.attention_maps import attention_map, causal_weights, pieces

END = 1 << 30


def rows(*ranges: tuple[int, int]) -> Layout:
    return rank_layout(RangeSet(ranges))


def at_step(found: AttentionMap, until: int = END) -> RecordedAttention:
    made = RecordedAttention(found, 64)
    made.begin_turn()
    made.begin_step(until)
    return made


@settings(deadline=None)
@given(st.integers(2, 16), st.integers(0, 3), st.data())
def test_taken_is_what_the_queries_paid_to_rows_that_they_saw_and_that_are_still_there(
    n: int, seed: int, data: st.DataObject
) -> None:
    weights = causal_weights(n, seed=seed)
    made = at_step(attention_map(weights, every=1, block=1))
    half = data.draw(st.integers(1, n - 1))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, half), st.integers(0, half))))
    made.computed(0, half, ())
    first = made.taken(rows((0, half)))
    np.testing.assert_allclose(first.mass, weights[:, :, :half, :half].sum(axis=(1, 2)), rtol=1e-5)
    np.testing.assert_allclose(first.mass.sum(), 6 * half, rtol=1e-5)
    # [start, stop) leaves before the rest is computed, and is there again when it is asked for.
    made.computed(half, n, rows((0, start), (stop, half)))
    second = made.taken(rows((0, n)))
    paid = weights[:, :, half:].sum(axis=(1, 2))
    paid[:, start:stop] = 0
    np.testing.assert_allclose(second.mass, paid, rtol=1e-5)
    assert (first.n_queries, second.n_queries) == (half, n - half)
    assert not made.taken(rows((0, n))).mass.any()


def test_a_piece_that_the_tape_ends_in_is_taken_when_it_is_whole() -> None:
    weights = causal_weights(12)
    made = at_step(attention_map(weights, every=4, block=4))
    made.computed(0, 6, ())
    assert made.taken(rows((0, 6))).n_queries == 4
    made.computed(6, 8, rows((0, 6)))
    late = made.taken(rows((0, 8)))
    assert late.n_queries == 4
    np.testing.assert_allclose(late.mass.sum(axis=1), weights[:, :, 4:8].sum(axis=(1, 2, 3)), rtol=1e-5)


def test_a_window_is_of_the_last_whole_pieces() -> None:
    weights = causal_weights(12)
    made = at_step(attention_map(weights, every=2, block=1))
    made.computed(0, 9, ())
    found = made.window(6, 9, (1,), rows((0, 4), (5, 9)))
    assert found.tape_positions.tolist() == [0, 1, 2, 3, 5]
    assert (found.layers, found.n_queries) == ((1,), 4)
    np.testing.assert_allclose(found.mass[0], weights[1, :, 4:8].sum(axis=(0, 1))[[0, 1, 2, 3, 5]], rtol=1e-5)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 12))
def test_later_counts_as_long_as_the_tape_is_the_same(length: int, cut: int) -> None:
    """The second turn goes on from `cut`: what it pays to positions before that is to the same tokens."""
    one, two = causal_weights(12, seed=1), causal_weights(14, seed=2)
    first = pieces(one, 0, 12, every=1, block=1, seq=1)
    second = pieces(two, cut, 14, every=1, block=1, turn=2, seq=101)
    made = at_step(AttentionMap("s0", (0, 1), (*first, *second)), until=100)
    made.computed(0, length, ())
    found = made.later(rows((0, length)))
    want = one[:, :, length:].sum(axis=(1, 2))[:, :length]
    want[:, :cut] += two[:, :, cut:].sum(axis=(1, 2))[:, : min(cut, length)]
    np.testing.assert_allclose(found.mass, want, rtol=1e-5)
    assert found.n_queries == 12 - length + 14 - cut


def test_a_gap_is_an_error_and_leaves_no_account() -> None:
    made = at_step(attention_map(causal_weights(8), every=2, block=2))
    made.computed(0, 10, ())
    with pytest.raises(NoAttention, match=r"from tape position 8 on .*--score-all"):
        made.taken(rows((0, 10)))
    assert made.account() is None


def test_what_is_computed_again_to_have_its_rows_back_is_in_no_account() -> None:
    made = at_step(attention_map(causal_weights(8), every=1, block=1))
    made.computed(0, 8, ())
    made.computed(2, 4, rows((0, 2)), again=True)
    account = made.account()
    assert account is not None
    assert (account.queries, account.low) == (8, 1.0)


def test_a_restore_brings_the_account_of_the_turn_back() -> None:
    made = at_step(attention_map(causal_weights(10), every=1, block=1))
    made.computed(0, 4, ())
    made.save(0)
    made.computed(4, 9, rows((2, 4)))
    made.put_back(0)
    account = made.account()
    assert account is not None
    assert (account.queries, account.low) == (4, 1.0)
    made.begin_turn()
    made.put_back(0)
    assert made.account() == type(account)(0, 1.0, 1.0, 1.0)
