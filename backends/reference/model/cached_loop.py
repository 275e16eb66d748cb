"""`generate_cached`: greedy generation with a cache, as a plain loop that is no engine. The oracle of token streams.

It shares the layer steps with the engines and nothing else: rows are arrays that grow, attention is one softmax over
all of them, and no page, no block size, no transaction is involved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtape.backends.reference.model.blas import Floats, one_blas_thread
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.normal import soft_cap
from kvtape.backends.reference.model.steps import Positions, attn_out, embed, ffn, lm_head, qkv
from kvtape.backends.reference.model.tokens import Ids, checked_tokens
from kvtape.backends.reference.model.weights import Weights

__all__ = ["generate_cached"]


def generate_cached(weights: Weights, prompt: Sequence[int], n: int, window: int = 0) -> list[int]:
    """The `n` tokens that follow `prompt`, each the first of the largest logits. A query sees `window` rows, 0 for all.

    Memory is quadratic in the prompt. Raises EmptyPrompt, InputRejected.
    """
    new = checked_tokens(prompt, weights.n_vocab)
    rows: list[tuple[Floats, Floats]] = []
    out: list[int] = []
    start = 0
    with one_blas_thread():
        while len(out) < n:
            hidden = _through_the_layers(weights, new, start, rows, window)
            start += len(new)
            out.append(int(lm_head(weights, hidden[-1:])[0].argmax()))
            new = np.asarray(out[-1:], np.int32)
    return out


def _through_the_layers(
    weights: Weights, tokens: Ids, start: int, rows: list[tuple[Floats, Floats]], window: int
) -> Floats:
    """Rows behind the last layer; `rows` `[n_layer]` of keys and values gain those of `tokens`."""
    arch, local = weights.architecture, LocalFfn(weights)
    positions = np.arange(start, start + len(tokens), dtype=np.int64)
    x = embed(weights, tokens)
    for layer in range(arch.n_layer):
        q, k, v = qkv(weights, layer, x, positions)
        if start:
            k, v = np.concatenate([rows[layer][0], k]), np.concatenate([rows[layer][1], v])
            rows[layer] = (k, v)
        else:
            rows.append((k, v))
        widths = [w for w in (window, arch.windows[layer]) if w]
        x = x + attn_out(weights, layer, _attended(weights, q, k, v, positions, min(widths, default=len(k))))
        x = x + ffn(weights, layer, x, local)
    return x


def _attended(weights: Weights, q: Floats, k: Floats, v: Floats, positions: Positions, window: int) -> Floats:
    """Softmax attention `[n, n_head * head_dim_v]`, each query head over its KV head's rows 0, 1, 2, ..."""
    arch = weights.architecture
    group = q.shape[1] // k.shape[1]
    behind = positions[:, None] - np.arange(len(k))
    hidden = (behind < 0) | (behind >= window)
    out = np.empty((len(q), q.shape[1], v.shape[2]), q.dtype)
    for head in range(q.shape[1]):
        scores = soft_cap(q[:, head] @ k[:, head // group].T * q.dtype.type(arch.query_scale), arch.attention_cap)
        scores[hidden] = -np.inf
        weights_of = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights_of @ v[:, head // group] / weights_of.sum(axis=1, keepdims=True)
    return out.reshape(len(q), -1)
