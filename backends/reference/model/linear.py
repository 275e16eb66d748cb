"""Rows times a weight matrix, tile by tile of the matrix: the one product that every layer step is made of.

A tile is a block of output components. Plain and packed weights are cut into the same tiles and multiplied by the same
calls, so that the only difference between them is when a tile was dequantised.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvtape.backends.reference.model.blas import Floats, one_blas_thread, row_plan
from kvtape.backends.reference.model.matrix import Matrix

__all__ = ["Projection", "linear"]


class Projection(NamedTuple):
    """A matrix `[n_out, n_in]` and its bias `[n_out]`, or None."""

    matrix: Matrix
    bias: Floats | None = None


def linear(x: Floats, projection: Projection) -> Floats:
    """`x` `[n, n_in]` to `[n, n_out]`. The bits of a row do not depend on the other rows, nor on their number."""
    matrix, bias = projection
    x = matrix.taken(x)
    out = np.empty((len(x), matrix.n_out), x.dtype)
    with one_blas_thread():
        for start, tile in matrix.tiles():
            _multiply(x, tile, out[:, start : start + len(tile)])
    if bias is not None:
        out += bias
    return out


def _multiply(x: Floats, tile: Floats, out: Floats) -> None:
    n_out, n_in = tile.shape
    for start, stop, call in row_plan("weight", n_in, n_out, x.dtype).pieces(len(x)):
        rows, n = x[start:stop], stop - start
        if n < call.size:
            rows = np.zeros((call.size, n_in), x.dtype)
            rows[call.first : call.first + n] = x[start:stop]
        out[start:stop] = (tile @ np.ascontiguousarray(rows).T).T[call.first : call.first + n]
