"""The one way in which rows pass through the layers, whatever engine keeps them.

An engine says one thing for each layer: what the new rows attend to (`LayerRows.seen`). The rest is here, so that two
engines can only differ in what they keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from kvtape.backends.reference.errors import BackendFailure
from kvtape.backends.reference.model.attention import Observe
from kvtape.backends.reference.model.blas import Floats, one_blas_thread
from kvtape.backends.reference.model.ffn import FfnRouter
from kvtape.backends.reference.model.pages import Pages
from kvtape.backends.reference.model.steps import Positions, attention_of, attn_out, ffn, lm_head, qkv
from kvtape.backends.reference.model.weights import Weights

__all__ = ["LayerRows", "NewRows", "Seen", "advance", "layer_step", "logits_of", "served_logits"]


class NewRows(NamedTuple):
    """What a layer has of the new rows: its input `x` `[n, n_embd]`, rotated keys and values `[n, n_head_kv, d]`."""

    positions: Positions
    x: Floats
    keys: Floats
    values: Floats


class Seen(NamedTuple):
    """All rows that the new queries may attend to, their own among them, and the engine's window (0 for none)."""

    pages: Pages
    window: int = 0


class LayerRows(Protocol):
    """What an engine keeps, asked once a layer, layers in order."""

    def seen(self, layer: int, new: NewRows) -> Seen:
        """Take the new rows in, and give everything that they see.

        Nothing is final until the whole step is done: the caller takes the rows back out where a later layer fails.
        """


def advance(
    weights: Weights,
    router: FfnRouter,
    x: Floats,
    positions: Positions,
    rows: LayerRows,
    observer: Callable[[int], Observe | None] | None = None,
) -> Floats:
    """Residual rows `[n, n_embd]` behind the last layer, of embedded rows `x` at ascending `positions`.

    `observer` is asked for each layer who looks at its attention. Raises whatever the router or `rows` raises; which
    layers have taken the new rows in is then for `rows` to know.
    """
    with one_blas_thread():
        for layer in range(weights.architecture.n_layer):
            x = layer_step(weights, router, layer, x, positions, rows, observer(layer) if observer else None)
    return x


def layer_step(
    weights: Weights,
    router: FfnRouter,
    layer: int,
    x: Floats,
    positions: Positions,
    rows: LayerRows,
    observe: Observe | None = None,
) -> Floats:
    """One layer. For engines and hooks that do something between layers."""
    q, k, v = qkv(weights, layer, x, positions)
    pages, window = rows.seen(layer, NewRows(positions, x, k, v))
    attended = attention_of(weights, layer, q, positions, pages, window, observe)
    x = x + attn_out(weights, layer, attended)
    return x + ffn(weights, layer, x, router)


def logits_of(weights: Weights, hidden: Floats) -> Floats:
    """`lm_head` as `advance` computes: on one BLAS thread."""
    with one_blas_thread():
        return lm_head(weights, hidden)


def served_logits(weights: Weights, hidden: Floats) -> Floats:
    """Logits `[n_vocab]` of one row, to choose a token by. Raises BackendFailure for what is no number."""
    logits: Floats = logits_of(weights, hidden)[0]
    if not np.isfinite(logits).all():
        raise BackendFailure(f"{weights.path}: the model gave logits that are no numbers; convert it again")
    return logits
