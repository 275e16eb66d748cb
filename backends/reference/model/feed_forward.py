"""What a feed-forward layer is made of, and its formula: gated, or a few of many gated experts for each row.

Experts after llama.cpp (`build_moe_ffn`, MIT): a router gives a probability to each; a row goes through its `n_used`
most probable experts (the first of equals), and the answers are added in that order, weighted by probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtape.backends.reference.model.architecture import Activation
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.linear import Projection, linear
from kvtape.backends.reference.model.normal import activate

__all__ = ["Experts", "FeedForward", "Gated", "Shared", "feed_forward", "route"]

_LEAST_SUM: Final = 6.103515625e-5
"""Of the shares before they are made to add up to 1: the smallest normal f16, as in llama.cpp."""


@dataclass(frozen=True, slots=True)
class Gated:
    """`down(activation(gate(h)) * up(h))` (arXiv 2002.05202)."""

    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class Shared:
    """An expert that every row goes through, weighted by the sigmoid of its dot product with `weight` `[n_embd]`."""

    gated: Gated
    weight: Floats


@dataclass(frozen=True, slots=True)
class Experts:
    """`router` `[n_expert, n_embd]`. `normalised`: the shares of the experts used are made to add up to 1."""

    router: Projection
    gated: tuple[Gated, ...]
    n_used: int
    normalised: bool
    shared: Shared | None = None


FeedForward = Gated | Experts


def feed_forward(h: Floats, layer: FeedForward, activation: Activation) -> Floats:
    """`[n, n_embd]` of rows `h`. A row's bits depend on the row alone, whichever rows share an expert with it."""
    if isinstance(layer, Gated):
        return _gated(h, layer, activation)
    chosen, shares = route(h, layer)
    parts = np.empty((*chosen.shape, h.shape[1]), h.dtype)
    for expert in np.unique(chosen):
        rows, places = np.nonzero(chosen == expert)
        parts[rows, places] = _gated(h[rows], layer.gated[expert], activation)
    parts *= shares[..., None]
    out: Floats = parts[:, 0].copy()
    for place in range(1, layer.n_used):
        out += parts[:, place]
    if layer.shared is not None:
        out += _gated(h, layer.shared.gated, activation) * _sigmoid((h * layer.shared.weight).sum(axis=1))[:, None]
    return out


def route(h: Floats, experts: Experts) -> tuple[npt.NDArray[np.int64], Floats]:
    """The experts of each row `[n, n_used]`, most probable first, and what each adds."""
    logits = linear(h, experts.router)
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    chosen = np.argsort(-probabilities, axis=1, kind="stable")[:, : experts.n_used]
    shares = np.take_along_axis(probabilities, chosen, axis=1)
    if experts.normalised:
        shares /= np.maximum(shares.sum(axis=1, keepdims=True), h.dtype.type(_LEAST_SUM))
    return chosen, shares


def _gated(h: Floats, w: Gated, activation: Activation) -> Floats:
    inner = activate(linear(h, w.gate), activation)
    inner *= linear(h, w.up)
    return linear(inner, w.down)


def _sigmoid(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))
