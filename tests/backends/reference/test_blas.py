"""The claim that everything exact rests on: a row's bits do not depend on the rows beside it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits

from kvtape.backends.reference import blas
from kvtape.backends.reference.blas import BLOCK, RowPlan, one_blas_thread, row_plan
from kvtape.backends.reference.linear import Projection, linear
from support.reference import weights


@given(st.integers(1, 500), st.sets(st.sampled_from([4, 8, 16, 32, 64])))
def test_pieces_cover_every_row_once_with_sizes_of_the_plan(n: int, smaller: set[int]) -> None:
    plan = RowPlan((*sorted(smaller), BLOCK))
    pieces = list(plan.pieces(n))
    assert [i for start, stop, _ in pieces for i in range(start, stop)] == list(range(n))
    for start, stop, size in pieces:
        assert size in plan.sizes
        assert stop - start <= size
        assert all(other < stop - start for other in plan.sizes if other < size)


@settings(max_examples=30)
@given(st.integers(0, 399), st.integers(1, 400))
def test_a_row_has_the_same_bits_in_any_company(start: int, n: int) -> None:
    projection = weights("llama").layers[0].q
    x = np.random.default_rng(1).standard_normal((400, projection.matrix.n_in)).astype(np.float32)
    stop = min(400, start + n)
    np.testing.assert_array_equal(linear(x[start:stop], projection), linear(x, projection)[start:stop])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", ["weight", "keys", "values"])
def test_every_size_of_a_plan_gives_the_bits_of_a_full_block(side: str, dtype: type) -> None:
    plan = row_plan(side, 64, 256, np.dtype(dtype))
    assert plan.sizes[-1] in (1, BLOCK)
    rng = np.random.default_rng(7)
    right = rng.standard_normal((64, 256) if side == "values" else (256, 64)).astype(dtype)
    x = rng.standard_normal((BLOCK, 64)).astype(dtype)
    with one_blas_thread():
        whole = blas._product(side, x, right)
        for size in plan.sizes:
            pieces = [blas._product(side, x[i : i + size].copy(), right) for i in range(0, BLOCK, size)]
            np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_a_product_whose_bits_depend_on_the_size_loses_that_size() -> None:
    rows = np.ones((BLOCK, 8), np.float32)
    plan = blas._measured(
        lambda x: x + (1e-6 if len(x) == 4 else 0), rows + np.arange(BLOCK, dtype=np.float32)[:, None]
    )
    assert plan.sizes == (8, 16, 32, 64, BLOCK)


def test_a_product_whose_bits_depend_on_the_place_is_computed_row_by_row() -> None:
    rows = np.arange(BLOCK, dtype=np.float32)[:, None]
    plan = blas._measured(lambda x: x + np.arange(len(x), dtype=np.float32)[:, None] * 1e-3, rows)
    assert plan.sizes == (1,)
    assert list(plan.pieces(3)) == [(0, 1, 1), (1, 2, 1), (2, 3, 1)]


def test_blas_has_one_thread_within_and_its_own_number_after() -> None:
    def threads() -> list[int]:
        return [lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"]

    with threadpool_limits(2, user_api="blas"):
        with one_blas_thread():
            assert set(threads()) == {1}
            with one_blas_thread():
                pass
            assert set(threads()) == {1}
        assert set(threads()) == {2}


def test_who_leaves_first_does_not_give_the_threads_back() -> None:
    """Two forwards on two threads of the process: the number is put back by the last of them."""

    def threads() -> set[int]:
        return {lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}

    with threadpool_limits(2, user_api="blas"):
        first, second = one_blas_thread(), one_blas_thread()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert threads() == {1}
        second.__exit__(None, None, None)
        assert threads() == {2}


def test_a_bias_is_added() -> None:
    projection = weights("qwen2").layers[0].q
    assert projection.bias is not None
    x = np.random.default_rng(0).standard_normal((3, projection.matrix.n_in)).astype(np.float32)
    plain = linear(x, Projection(projection.matrix))
    np.testing.assert_array_equal(linear(x, projection), plain + projection.bias)
