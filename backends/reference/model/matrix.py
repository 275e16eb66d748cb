"""A weight matrix of a GGUF: dequantised once and kept, or kept packed and dequantised tile by tile at every use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvtape.backends.reference.errors import ModelUnsupported
from kvtape.backends.reference.model.activations import rounded_block, rounded_rows
from kvtape.backends.reference.model.blas import Floats

__all__ = ["Matrix", "Tensor", "dequantise", "matrix_slices"]

_TILE_BYTES: Final = 4 * 2**20
_TILE_ALIGN: Final = 64


class Matrix:
    """`[n_out, n_in]`. `packed`: nothing dequantised outlives the tile that is in use.

    `tensor` is one of the gguf library's, whose data is a view of the mapped file. `tiles_unpacked` counts the tiles
    that were dequantised for a product: how it is known which path ran. `float_bytes`: what is held beside the mapped
    file once the matrix was used. With `step` rows are rounded before they meet a packed matrix, as engines do
    (`activations`), in steps of so many times theirs; `block` neighbours of a row share a scale then.
    """

    def __init__(self, tensor: Any, dtype: np.dtype[Any], *, packed: bool, step: float | None = None) -> None:
        self.name = str(tensor.name)
        self.storage = str(tensor.tensor_type.name)
        self.n_out, self.n_in = len(tensor.data), int(tensor.shape[0])
        # An f32 file is used where it is mapped: there is nothing to unpack, and nothing to keep.
        mapped = self.storage == "F32" and dtype == np.float32
        self.packed = packed and not mapped
        self.float_bytes = 0 if packed or mapped else self.n_out * self.n_in * dtype.itemsize
        self.tiles_unpacked = 0
        self._tensor, self._dtype = tensor, dtype
        self._whole: Floats | None = None
        self._step = step
        self.block = 0 if step is None else rounded_block(tensor.tensor_type)
        self.rows(slice(0, 1))  # a type that cannot be dequantised is refused now, not in the middle of a forward

    def taken(self, x: Floats) -> Floats:
        """Rows `[n, n_in]` as they are multiplied."""
        return x if self._step is None or not self.block else rounded_rows(x, self.block, self._step)

    def tiles(self) -> Iterator[tuple[int, Floats]]:
        """`(first output component, tile [m, n_in])`, always cut at the same places."""
        for start in range(0, self.n_out, self._tile_rows):
            yield start, self._tile(start, min(start + self._tile_rows, self.n_out))

    def rows(self, indices: Any) -> Floats:
        """Rows `[n, n_in]` by index or slice, dequantised for this call."""
        return dequantise(self._tensor, self._tensor.data[indices], self._dtype)

    @property
    def resident_bytes(self) -> int:
        """Bytes held beside the mapped file."""
        whole = self._whole
        return 0 if whole is None or np.may_share_memory(whole, self._tensor.data) else whole.nbytes

    @property
    def file_bytes(self) -> int:
        return int(self._tensor.n_bytes)

    @property
    def _tile_rows(self) -> int:
        """Equal tiles of at most `_TILE_BYTES` in float32, whatever the type."""
        n_tiles = -(-self.n_out * self.n_in * 4 // _TILE_BYTES)
        return -(-self.n_out // n_tiles // _TILE_ALIGN) * _TILE_ALIGN

    def _tile(self, start: int, stop: int) -> Floats:
        if self.packed:
            self.tiles_unpacked += 1
            return self.rows(slice(start, stop))
        if self._whole is None:
            self._whole = self.rows(slice(None))
        return self._whole[start:stop]


@dataclass(frozen=True, slots=True)
class Tensor:
    """What is no tensor of a GGUF in the form of the gguf library's: `shape` with the input first, `data` by rows."""

    name: str
    tensor_type: Any
    data: Any
    shape: tuple[int, ...]
    n_bytes: int


def matrix_slices(tensor: Any) -> list[Any]:
    """The matrices `[n_out, n_in]` of a tensor `[n, n_out, n_in]`, each as a tensor whose data is a view."""
    n_in, n_out, n = (int(size) for size in tensor.shape)
    return [
        Tensor(f"{tensor.name}[{i}]", tensor.tensor_type, tensor.data[i], (n_in, n_out), tensor.data[i].nbytes)
        for i in range(n)
    ]


def dequantise(tensor: Any, data: Any, dtype: np.dtype[Any]) -> Floats:
    """`data` of a tensor (whole rows of it) by the gguf library. Float32 data that is aligned is not copied.

    Raises ModelUnsupported for a storage type that the library cannot dequantise.
    """
    import gguf

    try:
        values = gguf.dequantize(np.ascontiguousarray(data), tensor.tensor_type)
    except NotImplementedError:
        storage = tensor.tensor_type.name
        raise ModelUnsupported(
            f"{tensor.name} is stored as {storage}, which the gguf library does not dequantise; convert it"
        ) from None
    return np.ascontiguousarray(values, dtype=dtype)
