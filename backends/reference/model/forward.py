"""A whole text in one pass, with hooks between the layers: an entry of its own beside the engines.

Nothing here goes through an engine, and no engine knows of hooks: what they see is the plain forward that every exact
engine is held against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvtape.backends.reference.model.attention import AttentionBlock
from kvtape.backends.reference.model.blas import Floats, one_blas_thread
from kvtape.backends.reference.model.dispatch import NewRows, Seen, layer_step, logits_of
from kvtape.backends.reference.model.ffn import FfnRouter, LocalFfn
from kvtape.backends.reference.model.kv_rows import KvRows
from kvtape.backends.reference.model.steps import embed
from kvtape.backends.reference.model.tokens import checked_tokens
from kvtape.backends.reference.model.weights import Weights

__all__ = ["LayerHooks", "forward", "logits_at"]


@dataclass(frozen=True, slots=True)
class LayerHooks:
    """Called in the order of the layers, on the thread of the forward. An exception ends the forward.

    `before(layer, x)`: the input rows `[n, n_embd]`; an array in return takes their place. `rows(layer, new)`: rotated
    keys, values and the input of the layer. `attention(layer, block)`: probabilities, block of queries by block.
    `after(layer, x)`: the output rows; an array in return takes their place. Arrays handed over are not to be changed.
    """

    before: Callable[[int, Floats], Floats | None] | None = None
    rows: Callable[[int, NewRows], None] | None = None
    attention: Callable[[int, AttentionBlock], None] | None = None
    after: Callable[[int, Floats], Floats | None] | None = None


def forward(
    weights: Weights,
    tokens: Sequence[int],
    *,
    router: FfnRouter | None = None,
    hooks: LayerHooks | None = None,
    window: int = 0,
) -> Floats:
    """Residual rows `[n, n_embd]` behind the last layer. `router` None: computed here. `window`: 0 for none.

    Raises EmptyPrompt, InputRejected for tokens that the model does not have.
    """
    ids = checked_tokens(tokens, weights.n_vocab)
    hooks, router = hooks or LayerHooks(), router or LocalFfn(weights)
    positions = np.arange(len(ids), dtype=np.int64)
    keep = _Watched(KvRows(weights, window), hooks.rows)
    x = embed(weights, ids)
    with one_blas_thread():
        for layer in range(weights.architecture.n_layer):
            x = _replaced(hooks.before, layer, x)
            observe = partial(hooks.attention, layer) if hooks.attention else None
            x = layer_step(weights, router, layer, x, positions, keep, observe)
            keep.done(layer)
            x = _replaced(hooks.after, layer, x)
    return x


def logits_at(weights: Weights, tokens: Sequence[int], wanted: Sequence[int], window: int = 0) -> Floats:
    """Logits `[len(wanted), n_vocab]` after the tokens at these indices."""
    return logits_of(weights, forward(weights, tokens, window=window)[np.asarray(wanted, np.int64)])


def _replaced(hook: Callable[[int, Floats], Floats | None] | None, layer: int, x: Floats) -> Floats:
    other = hook(layer, x) if hook else None
    if other is None:
        return x
    if other.shape != x.shape:
        raise ValueError(f"a hook of layer {layer} gave rows of shape {other.shape} for {x.shape}")
    return np.ascontiguousarray(other, x.dtype)


class _Watched:
    """Rows of one layer at a time: a forward never looks back."""

    def __init__(self, rows: KvRows, watch: Callable[[int, NewRows], None] | None) -> None:
        self._rows, self._watch = rows, watch

    def seen(self, layer: int, new: NewRows) -> Seen:
        if self._watch:
            self._watch(layer, new)
        return self._rows.seen(layer, new)

    def done(self, layer: int) -> None:
        self._rows.layers[layer].clear()
