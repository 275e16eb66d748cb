"""Which token a row holds: layer-0 keys depend on the token and its cache position alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtape.backends.reference.model.blas import one_blas_thread
from kvtape.backends.reference.model.rope import Rotary
from kvtape.backends.reference.model.steps import embed, key_values
from kvtape.backends.reference.model.weights import Weights

__all__ = ["Identified", "KeyTable"]

Ints = npt.NDArray[np.int64]
_TOKEN_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Identified:
    """Per row: the nearest of the session's tokens int64 `[n]`, the relative distances to the claimed one and to the
    nearest other one float64 `[n]`, infinite where there is none."""

    nearest: Ints
    distance: npt.NDArray[np.float64]
    other: npt.NDArray[np.float64]


class KeyTable:
    """Layer-0 keys of some tokens at position 0, computed from the weights as the reference computes them."""

    def __init__(self, weights: Weights, tokens: Ints) -> None:
        self._rotary = weights.architecture.rotaries[0]
        self._n_heads = weights.architecture.shape.n_head_kv
        self._tokens = np.unique(tokens)
        blocks = [self._tokens[i : i + _TOKEN_BLOCK] for i in range(0, len(self._tokens), _TOKEN_BLOCK)]
        self._keys = np.concatenate([_keys(weights, block) for block in blocks])
        self._squares = np.einsum("ij,ij->i", self._keys, self._keys)

    def identify(self, rows: npt.NDArray[Any], positions: Ints, claimed: Ints) -> Identified:
        """Judge stored post-RoPE keys `[n, n_kv_heads * head_dim]` at these cache positions.

        `claimed` tokens must be among the table's; a row that is not a number is infinitely far from all of them.
        """
        keys = unrotated(self._rotary, rows, positions, self._n_heads)
        squares = np.einsum("ij,ij->i", keys, keys)
        distances = squares[:, None] + self._squares - 2 * (keys @ self._keys.T)
        distances[~np.isfinite(distances)] = np.inf
        own = np.searchsorted(self._tokens, claimed)
        # Taken from the difference itself: the expanded square cancels to 1e-7, too coarse for exact models.
        length = np.linalg.norm(self._keys[own], axis=1)
        apart = np.linalg.norm(keys - self._keys[own], axis=1) / length
        nearest = self._tokens[distances.argmin(axis=1)]
        distances[np.arange(len(own)), own] = np.inf
        other = np.sqrt(np.maximum(distances.min(axis=1), 0.0)) / length
        return Identified(nearest, np.where(np.isfinite(apart), apart, np.inf), other)


def unrotated(rotary: Rotary, rows: npt.NDArray[Any], positions: Ints, n_heads: int) -> npt.NDArray[np.float64]:
    """Rows `[n, n_heads * head_dim]` in float64, turned back from their cache positions to position 0."""
    heads = rows.astype(np.float64).reshape(len(rows), n_heads, -1)
    return rotary.turn(heads, -positions).reshape(len(rows), -1)


def _keys(weights: Weights, tokens: Ints) -> npt.NDArray[np.float64]:
    with one_blas_thread():
        keys, _ = key_values(weights, 0, embed(weights, tokens), np.zeros(len(tokens), np.int64))
    return keys.reshape(len(tokens), -1).astype(np.float64)
