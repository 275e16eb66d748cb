"""One decoder layer as pure steps. Engines put them together; none of them knows what an engine keeps.

    tokens -> embed -> [ x -> qkv -> attention_of -> attn_out -> x'  -> ffn -> x'' ] per layer -> lm_head -> logits

Rows are `[n, n_embd]` in the float type of the weights. A row's bits depend on the row, its position and what it may
see, never on the rows that are computed beside it: a decoded row equals the same row of a prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtape.backends.reference.model.attention import AttentionRule, Observe, attend, narrower
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.ffn import FfnRouter
from kvtape.backends.reference.model.linear import Projection, linear
from kvtape.backends.reference.model.normal import rms_norm, soft_cap
from kvtape.backends.reference.model.pages import Pages
from kvtape.backends.reference.model.weights import Weights

__all__ = ["Positions", "Qkv", "attention_of", "attn_out", "embed", "ffn", "key_values", "lm_head", "qkv"]

Positions = npt.NDArray[np.int64]
"""Cache positions `[n]`, ascending: what RoPE sees."""


class Qkv(NamedTuple):
    """`q` `[n, n_head, head_dim_k]` and `k` `[n, n_head_kv, head_dim_k]`, rotated; `v` `[n, n_head_kv, head_dim_v]`."""

    q: Floats
    k: Floats
    v: Floats


def embed(weights: Weights, tokens: Sequence[int] | npt.NDArray[np.integer]) -> Floats:
    """The input of layer 0, `[n, n_embd]`. Token ids are the caller's to check."""
    distinct, where = np.unique(np.asarray(tokens, np.int64), return_inverse=True)
    rows = weights.embedding.rows(distinct)[where]
    scale = weights.architecture.embed_scale
    return rows if scale == 1.0 else rows * np.asarray(scale, weights.dtype)


def qkv(weights: Weights, layer: int, x: Floats, positions: Positions) -> Qkv:
    """Queries, keys and values of the layer's input rows `x`."""
    w, arch = weights.layers[layer], weights.architecture
    h = rms_norm(x, w.attn_norm, arch.shape.rms_eps)
    q = _heads(weights, h, w.q, w.q_norm, arch.shape.n_head)
    k, v = _key_values(weights, layer, h, positions)
    return Qkv(arch.rotaries[layer].rotate(q, positions), k, v)


def key_values(weights: Weights, layer: int, x: Floats, positions: Positions) -> tuple[Floats, Floats]:
    """Keys and values alone: what an engine that keeps `x` recomputes. The same bits as `qkv` gives."""
    h = rms_norm(x, weights.layers[layer].attn_norm, weights.architecture.shape.rms_eps)
    return _key_values(weights, layer, h, positions)


def attention_of(
    weights: Weights,
    layer: int,
    q: Floats,
    positions: Positions,
    pages: Pages,
    window: int = 0,
    observe: Observe | None = None,
) -> Floats:
    """`[n, n_head * head_dim_v]`: queries over rows. `window` of the engine, beside the layer's own; 0 for none."""
    arch = weights.architecture
    rule = AttentionRule(arch.query_scale, narrower(arch.windows[layer], window), arch.attention_cap)
    return attend(q, positions, pages, rule, observe)


def attn_out(weights: Weights, layer: int, attended: Floats) -> Floats:
    """What attention adds to the residual rows, `[n, n_embd]`."""
    w = weights.layers[layer]
    return _normed(linear(attended, w.attn_out), w.post_attn_norm, weights)


def ffn(weights: Weights, layer: int, x: Floats, router: FfnRouter) -> Floats:
    """What the feed-forward adds to the residual rows `x` behind attention, `[n, n_embd]`."""
    w = weights.layers[layer]
    h = rms_norm(x, w.ffn_norm, weights.architecture.shape.rms_eps)
    return _normed(router.feed(layer, h), w.post_ffn_norm, weights)


def lm_head(weights: Weights, hidden: Floats) -> Floats:
    """Logits `[n, n_vocab]` of rows behind the last layer."""
    h = rms_norm(hidden, weights.output_norm, weights.architecture.shape.rms_eps)
    return soft_cap(linear(h, weights.head), weights.architecture.logit_cap)


def _key_values(weights: Weights, layer: int, h: Floats, positions: Positions) -> tuple[Floats, Floats]:
    w, arch = weights.layers[layer], weights.architecture
    k = _heads(weights, h, w.k, w.k_norm, arch.shape.n_head_kv)
    v = linear(h, w.v).reshape(len(h), arch.shape.n_head_kv, -1)
    return arch.rotaries[layer].rotate(k, positions), v


def _heads(weights: Weights, h: Floats, projection: Projection, norm: Floats | None, n_heads: int) -> Floats:
    rows = linear(h, projection).reshape(len(h), n_heads, -1)
    return _normed(rows, norm, weights)


def _normed(rows: Floats, norm: Floats | None, weights: Weights) -> Floats:
    return rows if norm is None else rms_norm(rows, norm, weights.architecture.shape.rms_eps)
