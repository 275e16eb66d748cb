"""The dense reference: one forward over every slot of a lineage, in numpy, no KV cache of any engine involved.

Each layer computes keys and values of a slot once. An epoch's queries attend to exactly the keys of that epoch, turned
to the cache positions they had then. Query blocks bound the memory: about 25 MB a block at 1,000 visible keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import Cancelled
from kvtape.replay.lineage import Epoch, Lineage, prune
from kvtape.replay.rotary import Rotary
from kvtape.replay.weights import Weights

__all__ = ["DenseModel", "reference_logits"]

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
_QUERY_BLOCK = 128
_ROW_BLOCK = 512
_HEAD_BLOCK = 8192


@dataclass(frozen=True, slots=True)
class DenseModel:
    """A decoder and the float type it computes in (`float32`, or `float64` for an oracle's precision)."""

    weights: Weights
    dtype: type[np.floating[Any]] = np.float32

    @classmethod
    def from_gguf(cls, path: str | Path, dtype: type[np.floating[Any]] = np.float32) -> DenseModel:
        """Raises ModelFileError for the file, ModelNotCovered for the kind of model."""
        return cls(Weights(path), dtype)


def reference_logits(
    model: DenseModel, lineage: Lineage, wanted: Ints, stop: Callable[[], bool] | None = None
) -> npt.NDArray[np.float32]:
    """Logits float32 `[len(wanted), n_vocab]` after each wanted slot.

    `stop` is asked before every layer; once it says yes, Cancelled is raised.
    """
    pruned, wanted = prune(lineage, wanted)
    if not len(wanted):
        return np.empty((0, model.weights.shape.n_vocab), np.float32)
    x = model.weights.embed(pruned.tokens).astype(model.dtype)
    positions = _own_positions(pruned)
    for layer in range(model.weights.shape.n_layer):
        if stop is not None and stop():
            raise Cancelled("the reference forward was stopped")
        block = _Layer(model, layer)
        attended = block.attend(x, pruned.epochs, positions)
        for rows in _blocks(len(x), _ROW_BLOCK):
            x[rows] += attended[rows] @ block.matrix("attn_output").T
            x[rows] += block.feed_forward(x[rows])
    return _head(model, x[wanted])


def _head(model: DenseModel, x: Array) -> npt.NDArray[np.float32]:
    weights = model.weights
    x = _rms_norm(x, weights.tensor("output_norm.weight"), weights.shape.rms_eps)
    n_vocab = weights.n_rows(weights.head)
    out = np.empty((len(x), n_vocab), np.float32)
    for rows in _blocks(n_vocab, _HEAD_BLOCK):
        out[:, rows] = x @ weights.rows(weights.head, rows.start, rows.stop).T.astype(model.dtype)
    return out


class _Layer:
    """One layer's weights, dequantised when the layer is entered."""

    def __init__(self, model: DenseModel, index: int) -> None:
        self._weights, self._dtype, self._prefix = model.weights, model.dtype, f"blk.{index}."
        self._shape = model.weights.shape
        self._rotary = Rotary.of(self._shape)
        self._cache: dict[str, Array] = {}

    def matrix(self, name: str) -> Array:
        """`[out, in]`."""
        if name not in self._cache:
            self._cache[name] = self._weights.tensor(f"{self._prefix}{name}.weight").astype(self._dtype)
        return self._cache[name]

    def attend(self, x: Array, epochs: tuple[Epoch, ...], positions: Ints) -> Array:
        """Attention output `[n, n_head * head_dim_v]` before the output projection, for inputs `[n, n_embd]`."""
        shape = self._shape
        q, k, v = self._project(x)
        q = self._rotary.rotate(q, positions) * self._dtype(shape.head_dim_k**-0.5)
        turned, turned_to = self._rotary.rotate(k, positions), positions.copy()
        out = np.empty((len(x), shape.n_head, shape.head_dim_v), self._dtype)
        for epoch in epochs:
            moved = np.flatnonzero(turned_to[epoch.keys] != epoch.key_positions)
            if len(moved):
                slots, to = epoch.keys[moved], epoch.key_positions[moved]
                turned[:, slots], turned_to[slots] = self._rotary.rotate(k[:, slots], to), to
            _attend_epoch(epoch, q, turned, v, out)
        return out.reshape(len(x), -1)

    def feed_forward(self, x: Array) -> Array:
        """SwiGLU of the normed rows `[n, n_embd]`."""
        h = _rms_norm(x, self.matrix("ffn_norm"), self._shape.rms_eps)
        gate = h @ self.matrix("ffn_gate").T
        gate /= 1 + np.exp(-gate)
        gate *= h @ self.matrix("ffn_up").T
        return np.asarray(gate @ self.matrix("ffn_down").T)

    def _project(self, x: Array) -> tuple[Array, Array, Array]:
        """Unrotated queries, keys and values, heads first: `[n_heads, n, head_dim]`."""
        shape = self._shape
        h = _rms_norm(x, self.matrix("attn_norm"), shape.rms_eps)
        q = self._heads(h, "attn_q", shape.n_head)
        k = self._heads(h, "attn_k", shape.n_head_kv)
        return q, k, self._heads(h, "attn_v", shape.n_head_kv)

    def _heads(self, h: Array, name: str, n_heads: int) -> Array:
        rows = h @ self.matrix(name).T
        bias = self._weights.optional(f"{self._prefix}{name}.bias")
        if bias is not None:
            rows += bias
        heads = rows.reshape(len(h), n_heads, -1).transpose(1, 0, 2)
        if self._weights.has(f"{self._prefix}{name}_norm.weight"):
            heads = _rms_norm(heads, self.matrix(f"{name}_norm"), self._shape.rms_eps)
        return np.ascontiguousarray(heads)


def _attend_epoch(epoch: Epoch, q: Array, k: Array, v: Array, out: Array) -> None:
    """Fill `out[first : first + n]`; `q`, `k`, `v` are `[heads, n_slots, head_dim]`, queries scaled, keys turned."""
    visible = np.concatenate([epoch.keys, np.arange(epoch.first, epoch.first + epoch.n)])
    group = len(q) // len(k)
    for kv_head in range(len(k)):
        keys, values = k[kv_head, visible], v[kv_head, visible]
        heads = slice(kv_head * group, (kv_head + 1) * group)
        for rows in _blocks(epoch.n, _QUERY_BLOCK):
            m = len(epoch.keys) + rows.stop
            slots = slice(epoch.first + rows.start, epoch.first + rows.stop)
            attended = _softmax_average(q[heads, slots], keys[:m], values[:m])
            out[slots, heads] = attended.transpose(1, 0, 2)


def _softmax_average(q: Array, keys: Array, values: Array) -> Array:
    """Attention of queries `[group, b, d]` over `[m, d]`; the last b keys are the queries' own, seen causally."""
    group, b, _ = q.shape
    scores = (q.reshape(group * b, -1) @ keys.T).reshape(group, b, -1)
    scores[:, :, -b:][:, ~np.tri(b, dtype=bool)] = -np.inf
    scores -= scores.max(axis=2, keepdims=True)
    np.exp(scores, out=scores)
    sums = scores.sum(axis=2, keepdims=True)
    return np.asarray((scores.reshape(group * b, -1) @ values).reshape(group, b, -1) / sums)


def _own_positions(lineage: Lineage) -> Ints:
    positions = np.empty(lineage.n_slots, np.int64)
    for epoch in lineage.epochs:
        positions[epoch.first : epoch.first + epoch.n] = np.arange(epoch.position, epoch.position + epoch.n)
    return positions


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps))
    return np.asarray(x * scale * weight.astype(x.dtype))


def _blocks(n: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]
