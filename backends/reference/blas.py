"""Matrix products whose rows do not depend on their company.

BLAS picks another kernel for another number of rows, and another kernel adds in another order: the same row comes out
with other last bits alone than in a prompt. Here every product has one of a few fixed numbers of rows, and which of
those give the same bits is found out from the library itself, once for each shape: rows are multiplied in a block of
`BLOCK`, moved by one place within it, and in blocks of each smaller size; a size counts only where every bit agrees.
So a decoded row is bit-identical to the same row of a prefill on whatever BLAS this is, or the shape falls back to
fewer sizes; at worst to single rows, slow and still exact.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

__all__ = ["BLOCK", "Floats", "RowPlan", "one_blas_thread", "row_plan"]

Floats = npt.NDArray[Any]
"""float32, or float64 where the model was opened so."""

BLOCK: Final = 128
"""Rows of a full block."""

_SMALLER: Final = (4, 8, 16, 32, 64)

Side = Literal["weight", "keys", "values"]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """`sizes`: numbers of rows that give the same bits, ascending; the last is a full block."""

    sizes: tuple[int, ...]

    def pieces(self, n: int) -> Iterator[tuple[int, int, int]]:
        """`(start, stop, size)` of each product for `n` rows: full blocks, then the smallest size for the rest."""
        block = self.sizes[-1]
        full = n - n % block
        for start in range(0, full, block):
            yield start, start + block, block
        if full < n:
            yield full, n, next(size for size in self.sizes if size >= n - full)


class _OneThread:
    """The number of BLAS threads is the process's: the first one in sets it, the last one out puts it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._controller: Any = None
        self._limit: Any = None

    def enter(self) -> None:
        with self._lock:
            if self._controller is None:
                self._controller = ThreadpoolController()
            if not self._inside:
                self._limit = self._controller.limit(limits=1, user_api="blas")
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._limit.restore_original_limits()


_one_thread: Final = _OneThread()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Within it BLAS uses one thread: how many it has is another thing that bits depend on. Costs some 15 us.

    It may be entered again, and by several threads at once.
    """
    _one_thread.enter()
    try:
        yield
    finally:
        _one_thread.leave()


@functools.cache
def row_plan(side: Side, n_in: int, n_out: int, dtype: np.dtype[Any]) -> RowPlan:
    """The plan for `[rows, n_in]` times a fixed matrix, in the arrangement that `side` stands for.

    `weight`: `(w[n_out, n_in] @ x.T).T`; `keys`: `x @ k[n_out, n_in].T`; `values`: `x @ v[n_in, n_out]`.
    """
    rng = np.random.default_rng(n_in * 1_000_003 + n_out)
    right = rng.standard_normal((n_in, n_out) if side == "values" else (n_out, n_in)).astype(dtype)
    rows = rng.standard_normal((BLOCK, n_in)).astype(dtype)
    return _measured(lambda x: _product(side, x, right), rows)


def _product(side: Side, x: Floats, right: Floats) -> Floats:
    if side == "weight":
        return np.asarray((right @ x.T).T)
    return np.asarray(x @ right.T if side == "keys" else x @ right)


def _measured(product: Callable[[Floats], Floats], rows: Floats) -> RowPlan:
    with one_blas_thread():
        whole = product(rows)
        if not np.array_equal(np.roll(whole, 1, axis=0), product(np.roll(rows, 1, axis=0))):
            return RowPlan((1,))
        return RowPlan((*(size for size in _SMALLER if _agrees(product, rows, whole, size)), BLOCK))


def _agrees(product: Callable[[Floats], Floats], rows: Floats, whole: Floats, size: int) -> bool:
    pieces = [product(np.ascontiguousarray(rows[i : i + size])) for i in range(0, BLOCK, size)]
    return np.array_equal(np.concatenate(pieces), whole)
