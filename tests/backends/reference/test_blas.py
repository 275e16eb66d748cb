"""The claim that everything exact rests on: a row's bits do not depend on the rows beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits

from kvtape.backends.reference.model.blas import (
    BLOCK,
    Call,
    Floats,
    RowPlan,
    Side,
    measured_plan,
    one_blas_thread,
    row_plan,
)
from kvtape.backends.reference.model.linear import Projection, linear
from support.reference import weights
from support.repository import ROOT

CALLS = [Call(4, 0, 4), Call(8, 0, 7), Call(16, 0, 0), Call(32, 8, 16), Call(64, 8, 48), Call(BLOCK, 8, 112)]


@given(st.integers(1, 500), st.sets(st.sampled_from(CALLS[:-1])))
def test_pieces_cover_every_row_once_with_calls_of_the_plan(n: int, smaller: set[Call]) -> None:
    plan = RowPlan((*sorted(smaller), CALLS[-1])).both(RowPlan((*sorted(smaller), CALLS[-1])))
    pieces = list(plan.pieces(n))
    assert [i for start, stop, _ in pieces for i in range(start, stop)] == list(range(n))
    for start, stop, call in pieces:
        assert call in plan.calls
        assert stop - start <= call.n
        assert all(other.n < stop - start for other in plan.calls if other.n < call.n)


@settings(max_examples=30)
@given(st.integers(0, 399), st.integers(1, 400))
def test_a_row_has_the_same_bits_in_any_company(start: int, n: int) -> None:
    projection = weights("llama").layers[0].q
    x = np.random.default_rng(1).standard_normal((400, projection.matrix.n_in)).astype(np.float32)
    stop = min(400, start + n)
    np.testing.assert_array_equal(linear(x[start:stop], projection), linear(x, projection)[start:stop])


def _by(rows: Floats, product: Callable[[Floats], Floats], call: Call) -> Floats:
    """Every row through `call` alone, the others of its product being other rows."""
    out = []
    for start in range(0, len(rows), call.n):
        padded = np.random.default_rng(start).standard_normal((call.size, rows.shape[1])).astype(rows.dtype)
        some = rows[start : start + call.n]
        padded[call.first : call.first + len(some)] = some
        out.append(product(padded)[call.first : call.first + len(some)])
    return np.concatenate(out)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", ["weight", "keys", "values"])
def test_every_call_of_a_plan_gives_a_row_the_same_bits(side: Side, dtype: type) -> None:
    plan = row_plan(side, 64, 256, np.dtype(dtype))
    rng = np.random.default_rng(7)
    right = rng.standard_normal((64, 256) if side == "values" else (256, 64)).astype(dtype)
    left = right.T if side == "values" else right
    rows = rng.standard_normal((100, 64)).astype(dtype)
    with one_blas_thread():
        outs = [
            _by(rows, lambda x: (left @ (x.T if side == "weight" else np.ascontiguousarray(x.T))).T, call)
            for call in plan.calls
        ]
    for out in outs:
        np.testing.assert_array_equal(out, outs[-1])
    np.testing.assert_allclose(outs[0], rows @ left.T, rtol=1e-3, atol=1e-4)


ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_a_product_whose_bits_depend_on_the_size_loses_that_size() -> None:
    plan = measured_plan(lambda x: x + np.float32(1e-3 if len(x) in (4, 32) else 0), ROWS)
    assert [call.size for call in plan.calls] == [8, 12, 16, 64, BLOCK]
    assert all((call.first, call.n) == (0, call.size) for call in plan.calls)


def test_places_at_the_edges_of_a_block_are_not_used_where_they_differ() -> None:
    def edges(x: Floats) -> Floats:
        """As AVX2 kernels do: another order in the first and the last 8 rows of anything larger than 12."""
        out = x.copy()
        if len(x) > 12:
            out[:8] += np.float32(1e-3)
            out[-8:] += np.float32(1e-3)
        return out

    plan = measured_plan(edges, ROWS)
    assert plan.calls == (
        Call(4, 0, 4), Call(8, 0, 8), Call(12, 0, 12), Call(32, 8, 16), Call(64, 8, 48), Call(BLOCK, 8, 112)
    )  # fmt: skip


def test_a_product_whose_bits_depend_on_the_place_is_computed_row_by_row() -> None:
    plan = measured_plan(lambda x: x + np.arange(len(x), dtype=np.float32)[:, None], ROWS)
    assert plan == RowPlan((Call(1, 0, 1),))
    assert list(plan.pieces(2)) == [(0, 1, Call(1, 0, 1)), (1, 2, Call(1, 0, 1))]


def test_two_products_use_the_places_of_both() -> None:
    one = RowPlan((Call(8, 0, 8), Call(32, 8, 16), Call(BLOCK, 8, 112)))
    other = RowPlan((Call(4, 0, 4), Call(8, 2, 6), Call(32, 0, 8), Call(BLOCK, 0, 100)))
    assert one.both(other).calls == (Call(8, 2, 6), Call(BLOCK, 8, 92))
    assert one.both(RowPlan((Call(4, 0, 4),))).calls == (Call(1, 0, 1),)


@pytest.mark.parametrize("kernels", ["Haswell", "Nehalem"])
def test_other_kernels_give_equal_bits_too(kernels: str) -> None:
    """What BLAS does on other machines: its kernels can be chosen where it is loaded, if this machine can run them."""
    code = (
        "import numpy as np, sys\n"
        "from support.reference import play, text, weights\n"
        "from kvtape.backends.reference.model.blas import row_plan\n"
        "a, b = (play(spec, weights('llama'), text(140), 3).hidden for spec in ('standard', 'no-cache'))\n"
        "plan = row_plan('weight', 64, 128, np.dtype(np.float32))\n"
        "sys.exit(not np.array_equal(a, b) or plan.calls[-1].n < 64)\n"
    )
    env = {**os.environ, "OPENBLAS_CORETYPE": kernels, "PYTHONPATH": str(ROOT / "tests")}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False, cwd=ROOT).returncode == 0


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
