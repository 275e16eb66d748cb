"""Feed-forward layers, experts among them, behind a router: where they are computed is the caller's choice, each call.

An engine is handed a router with every prefill and every decode step, keeps none, and never asks where it computes.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np

from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.feed_forward import feed_forward
from kvtape.backends.reference.model.weights import Weights

__all__ = ["FfnRouter", "LocalFfn"]

_ROWS: Final = 2048
"""Rows computed together: bounds the inner activations, which are several times as wide as a row."""


class FfnRouter(Protocol):
    """`name` says in reports where the layers were computed."""

    name: str

    def feed(self, layer: int, h: Floats) -> Floats:
        """The layer's feed-forward of normed rows `h` `[n, n_embd]`: `[n, n_embd]`, before any norm behind it.

        Row i of the answer depends on row i alone, to the bit. Raises BackendUnavailable where nobody answers,
        BackendFailure for an answer that cannot be used.
        """


class LocalFfn:
    """The layers of these weights, computed here."""

    name = "local"

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def feed(self, layer: int, h: Floats) -> Floats:
        w, activation = self._weights.layers[layer].feed, self._weights.architecture.activation
        out = np.empty_like(h)
        for start in range(0, len(h), _ROWS):
            out[start : start + _ROWS] = feed_forward(h[start : start + _ROWS], w, activation)
        return out
