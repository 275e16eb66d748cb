"""What queries pay to keys: the softmax of attention again, on the host, from rows the engine shows.

The engine's fused attention never writes its weights down, and asking its graph for them changes its numbers. Queries
and keys are what it multiplied, so their softmax under the same mask is what it used, up to rounding. Done here for a
block of queries at a time: at 4096 keys a block of 64 queries and 3 heads is 3 MB, whatever the length of the prefill.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from kvtape.backends.openvino.rope import F32, I64

__all__ = ["head_mass"]

_BLOCK_QUERIES = 64
_FEW_QUERIES = 8
_BLOCK_WEIGHTS = 1 << 20
"""Weights in flight, at most, unless one query alone has more: 4 MB."""


def head_mass(queries: F32, keys: F32, query_positions: I64, key_positions: I64) -> npt.NDArray[np.float64]:
    """Attention by head and key `[heads, n]`, summed over `queries` `[T, heads, head_dim]`.

    `keys` `[n, kv_heads, head_dim]`; both rotated to their cache positions, `[T]` and `[n]`. A query sees the keys at
    its own or a smaller position; each must see one. Scaled by 1/sqrt(head_dim).
    """
    n_keys, kv_heads, head_dim = keys.shape
    group = queries.shape[1] // kv_heads
    block = max(1, min(_BLOCK_QUERIES, _BLOCK_WEIGHTS // (group * max(1, n_keys))))
    scaled = queries * np.float32(1.0 / np.sqrt(head_dim))
    mass = np.zeros((queries.shape[1], n_keys), np.float64)
    # BLAS threads and the engine's would fight for the cores.
    with _blas().limit(limits=1, user_api="blas"):
        for at in range(0, len(queries), block):
            part = slice(at, at + block)
            _add_block(mass, scaled[part], keys, query_positions[part], key_positions)
    return mass


def _add_block(mass: npt.NDArray[np.float64], queries: F32, keys: F32, at: I64, key_positions: I64) -> None:
    seen = np.flatnonzero(key_positions <= at.max())
    stop = int(seen[-1]) + 1  # columns behind it nobody sees
    hidden = np.flatnonzero(key_positions[:stop] > at.min())
    first = int(hidden[0]) if hidden.size else stop  # columns before it everybody sees
    mask = np.where(key_positions[None, first:stop] <= at[:, None], np.float32(0), np.float32(-np.inf))
    n, heads, head_dim = queries.shape
    group = heads // keys.shape[1]
    for kv_head in range(keys.shape[1]):
        own = slice(kv_head * group, (kv_head + 1) * group)
        rows = np.ascontiguousarray(queries[:, own].transpose(1, 0, 2)).reshape(group * n, head_dim)
        own_keys = keys[:stop, kv_head]
        # The same product; BLAS is quicker with the long side first where there are few queries.
        weights = rows @ own_keys.T if n >= _FEW_QUERIES else np.ascontiguousarray((own_keys @ rows.T).T)
        by_head = weights.reshape(group, n, stop)
        by_head[:, :, first:] += mask
        weights -= weights.max(axis=1, keepdims=True)
        np.exp(weights, out=weights)
        shares = (1.0 / weights.sum(axis=1)).reshape(group, 1, n)
        mass[own, :stop] += (shares @ by_head)[:, 0]


@functools.cache
def _blas() -> ThreadpoolController:
    """Looking for the BLAS libraries of the process takes milliseconds, setting their threads microseconds."""
    return ThreadpoolController()
