"""Encoded rows of one layer, in the order of their positions. They are written once: there is no way to write again."""

from __future__ import annotations

import numpy as np

from kvtape.backends.reference.engines.turbo_codec import NORM_BYTES, BlockCodec, Coded
from kvtape.backends.reference.model.blas import Floats

__all__ = ["CodeStore"]


class CodeStore:
    """Rows `0 .. n_rows`, appended and never changed."""

    def __init__(self, codec: BlockCodec) -> None:
        self.codec = codec
        self.n_rows = 0
        self._norms = np.empty((0, codec.n_blocks), np.float32)
        self._codes = np.empty((0, codec.n_blocks, codec.code_bytes), np.uint8)

    def encode(self, rows: Floats) -> Coded:
        """Codes of rows `[n, kv_dim]`, which are not appended yet. Raises ValueError as the codec."""
        return self.codec.encode(rows)

    def append(self, coded: Coded) -> None:
        """Rows of this store's codec, behind those that are here."""
        stop = self.n_rows + len(coded.norms)
        if stop > len(self._norms):
            self._grow(stop if not self.n_rows else max(stop, self.n_rows + self.n_rows // 4))
        self._norms[self.n_rows : stop], self._codes[self.n_rows : stop] = coded
        self.n_rows = stop

    def coded(self, start: int = 0, stop: int | None = None) -> Coded:
        """Read-only views of rows `[start, stop)`; to the end by default."""
        stop = self.n_rows if stop is None else min(stop, self.n_rows)
        views = Coded(self._norms[start:stop], self._codes[start:stop])
        for view in views:
            view.flags.writeable = False
        return views

    def decoded(self, start: int = 0, stop: int | None = None) -> Floats:
        """`[n, kv_dim]` float32 of rows `[start, stop)`: the same bits whenever it is asked."""
        return self.codec.decode(self.coded(start, stop))

    @property
    def occupied_bytes(self) -> int:
        return self.n_rows * self.codec.row_bytes

    @property
    def allocated_bytes(self) -> int:
        assert self._norms.itemsize == NORM_BYTES
        return self._norms.nbytes + self._codes.nbytes

    def _grow(self, n_rows: int) -> None:
        """Both arrays or none: memory may end between them."""
        norms = np.empty((n_rows, *self._norms.shape[1:]), self._norms.dtype)
        codes = np.empty((n_rows, *self._codes.shape[1:]), self._codes.dtype)
        norms[: self.n_rows], codes[: self.n_rows] = self._norms[: self.n_rows], self._codes[: self.n_rows]
        self._norms, self._codes = norms, codes
