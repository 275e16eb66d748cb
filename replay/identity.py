"""Which token a row holds: layer-0 keys depend on the token and its cache position alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtape.replay.rotary import Rotary
from kvtape.replay.weights import Weights

__all__ = ["Identified", "KeyTable"]

Ints = npt.NDArray[np.int64]
_TOKEN_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Identified:
    """Per row: the nearest of the session's tokens int64 `[n]`, the relative distance to the claimed one `[n]`."""

    nearest: Ints
    distance: npt.NDArray[np.float64]


class KeyTable:
    """Unrotated layer-0 keys of some tokens, from the weights: embedding, norm, projection, bias, key norm."""

    def __init__(self, weights: Weights, tokens: Ints) -> None:
        self._shape = weights.shape
        self._rotary = Rotary.of(weights.shape)
        self._tokens = np.unique(tokens)
        blocks = [self._tokens[i : i + _TOKEN_BLOCK] for i in range(0, len(self._tokens), _TOKEN_BLOCK)]
        self._keys = np.concatenate([_keys(weights, block) for block in blocks])
        self._squares = np.einsum("ij,ij->i", self._keys, self._keys)

    def identify(self, rows: npt.NDArray[Any], positions: Ints, claimed: Ints) -> Identified:
        """Judge stored post-RoPE keys `[n, n_kv_heads * head_dim]` at these cache positions.

        `claimed` tokens must be among the table's; a row that is not a number is infinitely far from all of them.
        """
        keys = unrotated(self._rotary, rows, positions, self._shape.n_head_kv)
        squares = np.einsum("ij,ij->i", keys, keys)
        distances = squares[:, None] + self._squares - 2 * (keys @ self._keys.T)
        distances[~np.isfinite(distances)] = np.inf
        own = np.searchsorted(self._tokens, claimed)
        # Taken from the difference itself: the expanded square cancels to 1e-7, too coarse for exact models.
        apart = np.linalg.norm(keys - self._keys[own], axis=1) / np.linalg.norm(self._keys[own], axis=1)
        return Identified(self._tokens[distances.argmin(axis=1)], np.where(np.isfinite(apart), apart, np.inf))


def unrotated(rotary: Rotary, rows: npt.NDArray[Any], positions: Ints, n_heads: int) -> npt.NDArray[np.float64]:
    """Rows `[n, n_heads * head_dim]` in float64, turned back from their cache positions."""
    heads = rows.astype(np.float64).reshape(len(rows), n_heads, -1).transpose(1, 0, 2)
    back = rotary.rotate(heads, -positions).transpose(1, 0, 2)
    return np.ascontiguousarray(back).reshape(len(rows), -1)


def _keys(weights: Weights, tokens: Ints) -> npt.NDArray[np.float64]:
    shape = weights.shape
    x = _rms(weights.embed(tokens).astype(np.float64), shape.rms_eps) * weights.tensor("blk.0.attn_norm.weight")
    keys = x @ weights.tensor("blk.0.attn_k.weight").T.astype(np.float64)
    bias = weights.optional("blk.0.attn_k.bias")
    if bias is not None:
        keys = keys + bias
    norm = weights.optional("blk.0.attn_k_norm.weight")
    if norm is not None:
        keys = (_rms(keys.reshape(len(keys), shape.n_head_kv, -1), shape.rms_eps) * norm).reshape(len(keys), -1)
    return np.asarray(keys)


def _rms(x: npt.NDArray[np.float64], eps: float) -> npt.NDArray[np.float64]:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))
