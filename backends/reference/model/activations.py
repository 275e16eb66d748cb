"""Rows as engines multiply them with packed weights: rounded to 8 bits, block by block.

ggml turns the rows of a product into Q8_0, Q8_1 or Q8_K before it multiplies them with a packed matrix: whole numbers
from -127 to 127 times one scale for every block of 32, or of 256 under K-quants, with which the largest becomes 127.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvtape.backends.reference.model.blas import Floats

__all__ = ["rounded_block", "rounded_rows"]

_STEPS: Final = 127
_SMALL, _LARGE = 32, 256


def rounded_block(tensor_type: Any) -> int:
    """How many neighbours of a row share a scale where it meets a matrix of this type of the gguf library.

    0 for a type that is not packed: rows keep their precision there.
    """
    from gguf import GGML_QUANT_SIZES

    block, _ = GGML_QUANT_SIZES.get(tensor_type, (1, 0))
    if block == 1:
        return 0
    return _LARGE if block == _LARGE else _SMALL


def rounded_rows(x: Floats, block: int, step: float = 1.0) -> Floats:
    """`x` `[n, n_in]`, each number the nearest multiple of its block's scale.

    The scale is `step` times the engines' own, with which the largest number of the block is the 127th multiple: other
    steps near 1 round about as much, and elsewhere. `n_in` is a multiple of `block`.
    """
    blocks = x.reshape(len(x), -1, block)
    scale = np.abs(blocks).max(axis=2, keepdims=True) * x.dtype.type(step / _STEPS)
    scale[scale == 0] = 1  # a block of zeros stays one
    rounded: Floats = (np.rint(blocks / scale) * scale).reshape(x.shape)
    return rounded
