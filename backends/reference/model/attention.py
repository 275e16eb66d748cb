"""Attention of query rows over pages of keys and values, in blocks, with a bit-stable order of sums.

A query's result is a function of the query, its position and the rows it may see, and of nothing else: products have
the sizes of `blas.RowPlan`, sums run within a page first and then page by page from the lowest, and a row that a query
may not see adds an exact zero. Memory is bounded by the scores of one block: `_SCORE_BYTES`, or one head's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtape.backends.reference.errors import InvariantViolation
from kvtape.backends.reference.model.blas import Call, Floats, RowPlan, one_blas_thread, row_plan
from kvtape.backends.reference.model.normal import soft_cap
from kvtape.backends.reference.model.pages import PAGE, Pages

__all__ = ["AttentionBlock", "AttentionRule", "Observe", "attend", "narrower"]

Positions = npt.NDArray[np.int64]
_SCORE_BYTES: Final = 16 * 2**20


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """A query at p sees the keys at `p - window < position <= p`; `window` 0 is all of them. `cap`: see `soft_cap`."""

    scale: float
    window: int = 0
    cap: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Probabilities of some query rows and some heads. `weights` `[n_kv_heads, n, n_keys]`, each row sums to 1.

    Entry h of the first axis is KV head `first_head + h`. Row i belongs to query `queries[i]` (an index into the call's
    queries) and to query head `kv_head * group + members[i]`. `positions` `[n_keys]` of the keys; those that are not
    there, or not seen, have weight 0. A call gives as many blocks as it needs, each query and head in one of them.
    """

    first_head: int
    queries: Positions
    members: Positions
    positions: Positions
    weights: Floats


Observe = Callable[[AttentionBlock], None]


def narrower(window: int, other: int) -> int:
    """The smaller of two windows, where 0 means none."""
    return min(window, other) if window and other else window or other


def attend(
    q: Floats, positions: Positions, pages: Pages, rule: AttentionRule, observe: Observe | None = None
) -> Floats:
    """`[n, n_head * head_dim_v]` for rotated queries `[n, n_head, head_dim_k]` at `positions` `[n]`.

    Query heads are grouped: KV head h serves query heads `h * group .. (h + 1) * group`. The queries' own keys are
    among `pages`. Raises InvariantViolation where a query sees no key at all.
    """
    n, n_head, dim_k = q.shape
    n_kv, dim_v = pages.keys.shape[0], pages.values.shape[-1]
    group = n_head // n_kv
    scaled = q * q.dtype.type(rule.scale)
    # Rows of one KV head side by side, query by query: a block of them has few positions, and skips what none sees.
    rows = np.ascontiguousarray(scaled.reshape(n, n_kv, group, dim_k).transpose(1, 0, 2, 3)).reshape(n_kv, -1, dim_k)
    out = np.empty((n_kv, n * group, dim_v), q.dtype)
    at = np.repeat(positions, group)
    for start, stop, call in _plan(dim_k, dim_v, q.dtype).pieces(n * group):
        block = _Block(pages, rule, at[start:stop], call)
        for heads in _head_slices(n_kv, block.n_keys * call.size * q.itemsize):
            with one_blas_thread():
                attended, weights = block.attended(rows[heads, start:stop], heads, keep=observe is not None)
            out[heads, start:stop] = attended
            if observe is not None and weights is not None:
                index = np.arange(start, stop, dtype=np.int64)
                where = (heads.start, index // group, index % group, block.key_positions)
                observe(AttentionBlock(*where, weights))
    return np.ascontiguousarray(out.reshape(n_kv, n, group, dim_v).transpose(1, 0, 2, 3)).reshape(n, -1)


@functools.cache
def _plan(dim_k: int, dim_v: int, dtype: np.dtype[Any]) -> RowPlan:
    return row_plan("keys", dim_k, PAGE, dtype).both(row_plan("values", PAGE, dim_v, dtype))


def _head_slices(n_kv: int, bytes_a_head: int) -> list[slice]:
    step = max(1, _SCORE_BYTES // max(1, bytes_a_head))
    return [slice(i, min(i + step, n_kv)) for i in range(0, n_kv, step)]


class _Block:
    """Query rows at `positions` that are computed together, and the pages that any of them may see.

    Queries are columns: scores are `[heads, n_pages, PAGE, size]`.
    """

    def __init__(self, pages: Pages, rule: AttentionRule, positions: Positions, call: Call) -> None:
        low, high = int(positions.min()), int(positions.max())
        lowest_seen = max(0, low - rule.window + 1) if rule.window else 0
        first = max(lowest_seen // PAGE, pages.first)
        last = min(high // PAGE, pages.first + len(pages.live) - 1)
        self._range = slice(first - pages.first, max(first, last + 1) - pages.first)
        self._pages, self._rule, self._size = pages, rule, call.size
        self._used = slice(call.first, call.first + len(positions))
        # What is not used sees what the first query sees: something, so that no sum is 0.
        self._positions = np.full(call.size, positions[0])
        self._positions[self._used] = positions
        self.n_keys = (self._range.stop - self._range.start) * PAGE
        self.key_positions = np.arange(first * PAGE, first * PAGE + self.n_keys, dtype=np.int64)
        live = pages.live[self._range]
        starts = self.key_positions[::PAGE]
        whole = live.all(axis=1) & (starts + PAGE - 1 <= low)
        if rule.window:
            whole &= starts > high - rule.window
        self._partial = [(int(i), self._hidden(int(i), live[i])) for i in np.flatnonzero(~whole)]

    def attended(self, q: Floats, heads: slice, *, keep: bool) -> tuple[Floats, Floats | None]:
        """`[heads, n, head_dim_v]` of scaled queries `[heads, n, head_dim_k]`; with `keep`, the probabilities too."""
        if not self.n_keys:
            raise InvariantViolation(f"no key is there for the query at position {self._positions[self._used][0]}")
        columns = np.zeros((len(q), 1, q.shape[2], self._size), q.dtype)
        columns[:, 0, :, self._used] = q.transpose(0, 2, 1)
        keys, values = self._pages.keys[heads, self._range], self._pages.values[heads, self._range]
        scores = soft_cap(keys @ columns, self._rule.cap)
        for page, hidden in self._partial:
            scores[:, page, hidden] = -np.inf
        highest = _folded(np.maximum, scores).max(axis=1)
        if np.isneginf(highest).any():
            raise InvariantViolation(f"a query at one of {self._positions[self._used]} sees no key")
        scores -= highest[:, None, None]
        np.exp(scores, out=scores)
        sums = _in_order(_folded(np.add, scores))[:, None]
        attended = _in_order(values.transpose(0, 1, 3, 2) @ scores) / sums
        weights = None
        if keep:
            shares = (scores / sums[:, None])[..., self._used]
            weights = shares.reshape(len(q), self.n_keys, -1).transpose(0, 2, 1)
        return attended[:, :, self._used].transpose(0, 2, 1), weights

    def _hidden(self, page: int, live: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """`[PAGE, size]`: what a query may not see of this page."""
        at = self.key_positions[page * PAGE : (page + 1) * PAGE, None]
        seen = live[:, None] & (at <= self._positions)
        if self._rule.window:
            seen &= at > self._positions - self._rule.window
        return np.asarray(~seen)


def _folded(op: Callable[[Floats, Floats], Floats], scores: Floats) -> Floats:
    """`[heads, n_pages, size]` of `[heads, n_pages, PAGE, size]`: halves of a page, then halves of that, row by row.

    Elementwise, so that the order of a sum cannot depend on how many columns there are; and quick for few of them.
    """
    n = scores.shape[2]
    while n > 1:
        n //= 2
        scores = op(scores[:, :, :n], scores[:, :, n : 2 * n])
    return scores[:, :, 0]


def _in_order(parts: Floats) -> Floats:
    """The sum over pages (axis 1), from the first to the last."""
    total: Floats = parts[:, 0].copy()
    for page in range(1, parts.shape[1]):
        total += parts[:, page]
    return total
