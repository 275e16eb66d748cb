"""Rows as bytes: a block for the cold store, or a whole session, in the common envelope.

    payload  tape, cache, tokens, origin   4 x n int64
             keys, values                  [layers, n, kv_heads, head_dim] f32 each, keys at `origin`

All little-endian. What the runtime would take in silence (wrong sizes, NaN, positions used twice) is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvtape.backends.envelope import unwrap, wrap
from kvtape.backends.errors import StateRejected
from kvtape.backends.openvino.graph import GraphShape
from kvtape.backends.openvino.mirror import KvBuffer, Rows

__all__ = ["pack", "unpack"]

Kind = Literal["block", "snapshot"]
_VERSION = 1


def pack(kind: Kind, identity: Mapping[str, Any], rows: Rows) -> bytes:
    """`identity` names what a reader must share: model, engine, types. `rows` must hold keys and values."""
    header = {**identity, "kind": kind, "version": _VERSION, "n_rows": len(rows)}
    books = [np.ascontiguousarray(a, "<i8") for a in (rows.tape, rows.cache, rows.tokens, rows.origin)]
    floats = [np.ascontiguousarray(a, "<f4") for a in (rows.keys, rows.values)]
    return wrap(header, b"".join(a.tobytes() for a in (*books, *floats)))


def unpack(kind: Kind, identity: Mapping[str, Any], shape: GraphShape, blob: bytes) -> Rows:
    """Raises StateRejected when the envelope is damaged, is of another model or kind, or holds impossible rows."""
    header, payload = unwrap(blob, {**identity, "kind": kind, "version": _VERSION})
    n = header.get("n_rows")
    if not isinstance(n, int) or n < 0:
        raise StateRejected(f"saved state has n_rows {n!r}")
    per_row = shape.layers * shape.kv_heads
    sizes = [n] * 4 + [per_row * n * shape.head_dim_k, per_row * n * shape.head_dim_v]
    if len(payload) != 8 * sum(sizes[:4]) + 4 * sum(sizes[4:]):
        raise StateRejected(f"saved state has {len(payload)} payload bytes, which is not {n} rows of this model")
    books = np.frombuffer(payload, "<i8", 4 * n).reshape(4, n).astype(np.int64)
    floats = np.frombuffer(payload, "<f4", offset=32 * n).astype(np.float32)
    keys = floats[: sizes[4]].reshape(shape.layers, n, shape.kv_heads, shape.head_dim_k)
    values = floats[sizes[4] :].reshape(shape.layers, n, shape.kv_heads, shape.head_dim_v)
    tape, cache, tokens, origin = books
    _check(tape, cache, tokens, origin, shape.n_vocab)
    if not np.isfinite(floats).all():
        raise StateRejected("saved state holds values that are not finite")
    return Rows(KvBuffer(keys, values, n), tape, cache, tokens, origin)


def _check(
    tape: npt.NDArray[np.int64],
    cache: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    origin: npt.NDArray[np.int64],
    n_vocab: int,
) -> None:
    for name, positions in (("tape", tape), ("cache", cache)):
        if len(np.unique(positions)) != len(positions):
            raise StateRejected(f"saved state uses a {name} position twice")
    if any((a < 0).any() for a in (tape, cache, tokens, origin)) or (tokens >= n_vocab).any():
        raise StateRejected("saved state holds a position or token that cannot be")
    if (np.diff(cache) <= 0).any():
        raise StateRejected("saved state is not in cache order")
