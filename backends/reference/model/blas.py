"""Matrix products whose rows do not depend on their company.

BLAS picks another kernel for another number of rows, and on some machines another one for the rows at the edges of a
block; another kernel adds in another order, and the same row comes out with other last bits. Here every product has one
of a few fixed numbers of rows, and only the places count at which a row has the bits of a row in the middle of a full
block. Which places those are is found out from the library itself, once for each shape: a few rows are put at every
place of every size. So a decoded row is bit-identical to the same row of a prefill on whatever BLAS this is; where
hardly any place agrees, rows are multiplied one by one, slow and still exact.

    AVX-512 kernels:  4 rows [0 1 2 3]      128 rows [0 1 2 ... 127]
    AVX2 kernels:     8 rows [0 1 ... 7]    128 rows  . . . . . . . . [8 9 ... 119] . . . . . . . .     . not used
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

__all__ = ["BLOCK", "Call", "Floats", "RowPlan", "Side", "measured_plan", "one_blas_thread", "row_plan"]

Floats = npt.NDArray[Any]
"""float32, or float64 where the model was opened so."""

BLOCK: Final = 128
"""Rows of a full block."""

_SMALLER: Final = (4, 8, 12, 16, 32, 64)
_FEWEST_PLACES: Final = 8
"""With fewer of a full block in use, single rows are cheaper."""

_PROBES: Final = 4

Side = Literal["weight", "keys", "values"]


class Call(NamedTuple):
    """A product of `size` rows, of which those at `first`, .., `first + n - 1` are used."""

    size: int
    first: int
    n: int


@dataclass(frozen=True, slots=True)
class RowPlan:
    """`calls` that give a row the same bits, ascending by the rows they take."""

    calls: tuple[Call, ...]

    def pieces(self, n: int) -> Iterator[tuple[int, int, Call]]:
        """`(start, stop, call)` of each product for `n` rows: full blocks, then the smallest call for the rest."""
        most = self.calls[-1].n
        full = n - n % most
        for start in range(0, full, most):
            yield start, start + most, self.calls[-1]
        if full < n:
            yield full, n, next(call for call in self.calls if call.n >= n - full)

    def both(self, other: RowPlan) -> RowPlan:
        """For rows that pass through two products of the same size."""
        return _plan([_overlap(a, b) for a in self.calls for b in other.calls if a.size == b.size])


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
    """The plan for rows of `n_in` times a fixed matrix, in the arrangement that `side` stands for.

    `weight`: `w[n_out, n_in] @ rows[size, n_in].T`; `keys`: `k[n_out, n_in] @ columns[n_in, size]`; `values`:
    `v[n_in, n_out].T @ columns[n_in, size]`.
    """
    rng = np.random.default_rng(n_in * 1_000_003 + n_out)
    right = rng.standard_normal((n_in, n_out) if side == "values" else (n_out, n_in)).astype(dtype)
    rows = rng.standard_normal((_PROBES, n_in)).astype(dtype)
    left = right.T if side == "values" else right

    def product(x: Floats) -> Floats:
        return np.asarray(left @ (x.T if side == "weight" else np.ascontiguousarray(x.T))).T

    return measured_plan(product, rows)


def measured_plan(product: Callable[[Floats], Floats], rows: Floats) -> RowPlan:
    """The plan of `product`, `[size, n_in]` to `[size, n_out]`, from what it makes of each of `rows` `[n, n_in]`."""
    with one_blas_thread():
        repeated = {size: [product(np.repeat(row[None], size, axis=0)) for row in rows] for size in (*_SMALLER, BLOCK)}
    middle = [out[BLOCK // 2] for out in repeated[BLOCK]]
    calls = []
    for size, outs in repeated.items():
        same = np.all([(out == want).all(axis=1) for out, want in zip(outs, middle, strict=True)], axis=0)
        first, n = _longest_run(same)
        calls.append(Call(size, first, n))
    return _plan(calls)


def _plan(calls: list[Call]) -> RowPlan:
    """Those of `calls` that are of use: each takes more rows than every smaller one."""
    useful: list[Call] = []
    for call in sorted(calls):
        if call.n > max((other.n for other in useful), default=0):
            useful.append(call)
    if not useful or useful[-1].n < _FEWEST_PLACES:
        return RowPlan((Call(1, 0, 1),))
    return RowPlan(tuple(useful))


def _overlap(a: Call, b: Call) -> Call:
    first = max(a.first, b.first)
    return Call(a.size, first, max(0, min(a.first + a.n, b.first + b.n) - first))


def _longest_run(same: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """First place and length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]])))
    if not len(edges):
        return 0, 0
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    return int(starts[longest]), int(lengths[longest])
