"""Packed rows as the engine spreads them: every head multiplied by a Walsh-Hadamard matrix before it is packed.

A large component would take the resolution of its whole block; multiplied by a Hadamard matrix it is spread over all of
them. Queries are spread alike, so products stay what they were. The matrix is symmetric and its own inverse.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtape.backends.llama.blob import Cache
from kvtape.backends.llama.engine_words import EngineWords
from kvtape.backends.protocol import KvRows
from kvtape.capacity.model import ModelShape

__all__ = ["RowReader", "unspread"]

_VALUE_SIZE: Final = 64
"""Of the matrix over values. That over keys is as large as the largest power of two that divides a head."""


class RowReader:
    """Rows of the first cache of a context as attention sees them: numbers, not spread."""

    def __init__(self, words: EngineWords, shape: ModelShape) -> None:
        keys, values = (bool(spread) and spread[0] for spread in (words.spread_keys, words.spread_values))
        self._key_size = shape.head_dim_k & -shape.head_dim_k if keys else 1
        self._value_size = _VALUE_SIZE if values else 1

    def read(self, cache: Cache) -> KvRows:
        """In the order of the cells; f16 rows as float16, all others as float32."""
        keys = tuple(_unspread(k.numbers(), self._key_size) for k in cache.keys)
        return KvRows(keys, tuple(_unspread(v.numbers(), self._value_size) for v in cache.values))


def _unspread(rows: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    return unspread(rows, size) if size > 1 else rows


def unspread(rows: npt.NDArray[Any], size: int) -> npt.NDArray[np.float32]:
    """Rows `[n, width]` with every run of `size` components multiplied by the normalised Walsh-Hadamard matrix.

    By sums and differences alone: a row comes out the same to the bit whichever rows stand beside it.
    """
    out = rows.astype(np.float32).reshape(len(rows), -1, size)
    step = 1
    while step < size:
        pairs = out.reshape(len(rows), -1, size // (2 * step), 2, step)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        out = np.stack([first + second, first - second], axis=-2).reshape(out.shape)
        step *= 2
    return (out / np.float32(math.sqrt(size))).reshape(rows.shape)
