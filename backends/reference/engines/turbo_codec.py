"""The codec of `turbo-quant`: a row of keys or values as 3 or 4 bits a component, beside one norm a block.

    x -> |x|, x / |x| -> D H D / sqrt(d) -> times sqrt(d) -> nearest of 2^bits centroids

H is the Walsh-Hadamard matrix and D a diagonal of fixed signs; D H D / sqrt(d) is orthogonal and its own inverse. It
spreads a block until its components look drawn from a unit normal, for which the centroids are a Lloyd-Max quantiser
(Max 1960; Lloyd 1982), iterated to within .001 of its fixed point at 3 bits and .02 at 4. The norm kept is that of the
row, not of what the codes decode to, so a row that is encoded a second time comes out with other bytes: nothing may be
encoded twice.

A block takes `4 + ceil(d * bits / 8)` bytes. Everything is float32 and elementwise or within a block, so a row's codes
depend on the row alone, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtape.backends.reference.model.blas import Floats

__all__ = ["BLOCK_SIZES", "CENTROIDS", "BlockCodec", "Coded", "block_size"]

Float32s = npt.NDArray[np.float32]

BLOCK_SIZES: Final = (256, 128, 64, 32)
NORM_BYTES: Final = 4

_POSITIVE: Final = {
    3: (0.24459186, 0.7562692, 1.3450537, 2.1522968),
    4: (0.12723812, 0.38392428, 0.6500872, 0.9306258, 1.2384968, 1.5931331, 2.0297308, 2.6791892),
}

CENTROIDS: Final[dict[int, Float32s]] = {
    bits: np.array([*(-c for c in reversed(half)), *half], np.float32) for bits, half in _POSITIVE.items()
}
"""By bits: `[2^bits]` in units of the standard deviation, ascending and symmetric."""

_GROUP: Final = 8
"""Codes that are packed together: they fill `bits` whole bytes, the first code in the lowest bits."""

_SIGN_HASH: Final = 2654435761
_SIGN_BIT: Final = 16


class Coded(NamedTuple):
    """`norms` `[n, n_blocks]` float32; `codes` `[n, n_blocks, d * bits / 8]` bytes."""

    norms: Float32s
    codes: npt.NDArray[np.uint8]


def block_size(kv_dim: int) -> int | None:
    """The largest of `BLOCK_SIZES` that divides a row of `kv_dim = n_head_kv * head_dim`; None where none does.

    Of the row, not of a head: a block may hold several heads.
    """
    return next((size for size in BLOCK_SIZES if kv_dim % size == 0), None)


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """Rows of `kv_dim` components in blocks of `size`, which divides it and is a power of two. `bits` 3 or 4."""

    kv_dim: int
    size: int
    bits: int

    @property
    def n_blocks(self) -> int:
        return self.kv_dim // self.size

    @property
    def code_bytes(self) -> int:
        """Of one block, without its norm."""
        return -(-self.size * self.bits // 8)

    @property
    def row_bytes(self) -> int:
        return self.n_blocks * (NORM_BYTES + self.code_bytes)

    def encode(self, rows: Floats) -> Coded:
        """Rows `[n, kv_dim]`. Raises ValueError for a component that is not finite, or too large to square."""
        blocks = np.ascontiguousarray(rows, np.float32).reshape(len(rows), self.n_blocks, self.size)
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.sqrt((blocks * blocks).sum(axis=2))
        if not np.isfinite(norms).all():
            raise ValueError("a row has a component that is not finite, or too large; it cannot be encoded")
        unit = blocks / np.where(norms == 0, np.float32(1), norms)[..., None]
        # D H D / sqrt(d), times sqrt(d).
        spread = _signed_hadamard(unit)
        edges = (CENTROIDS[self.bits][1:] + CENTROIDS[self.bits][:-1]) / 2
        return Coded(norms, self._pack(np.searchsorted(edges, spread).astype(np.uint32)))

    def decode(self, coded: Coded) -> Float32s:
        """Rows `[n, kv_dim]`; a row of zeros comes back as zeros."""
        spread = CENTROIDS[self.bits][self._unpack(coded.codes)]
        # The inverse is the transform itself: / sqrt(d) for the scale, / sqrt(d) of its own.
        unit = _signed_hadamard(spread) / np.float32(self.size)
        return (unit * coded.norms[..., None]).reshape(len(coded.norms), self.kv_dim)

    def _pack(self, values: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
        groups = values.reshape(*values.shape[:2], self.size // _GROUP, _GROUP)
        words = np.bitwise_or.reduce(groups << self._shifts, axis=3).astype("<u4")
        octets = words[..., None].view(np.uint8)[..., : self.bits]
        return np.ascontiguousarray(octets).reshape(*values.shape[:2], self.code_bytes)

    def _unpack(self, codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
        octets = codes.reshape(*codes.shape[:2], self.size // _GROUP, self.bits).astype(np.uint32)
        words = np.bitwise_or.reduce(octets << (8 * np.arange(self.bits, dtype=np.uint32)), axis=3)
        values = words[..., None] >> self._shifts & np.uint32(2**self.bits - 1)
        return np.asarray(values, np.uint32).reshape(*codes.shape[:2], self.size)

    @property
    def _shifts(self) -> npt.NDArray[np.uint32]:
        return self.bits * np.arange(_GROUP, dtype=np.uint32)


def _signed_hadamard(blocks: Floats) -> Float32s:
    """`D H D` of the last axis `[.., d]`: butterflies in a fixed order."""
    d = blocks.shape[-1]
    signs = _signs(d)
    out: npt.NDArray[Any] = blocks * signs
    half = 1
    while half < d:
        pairs = out.reshape(*blocks.shape[:-1], d // (2 * half), 2, half)
        out = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2)
        half *= 2
    return np.asarray(out.reshape(blocks.shape) * signs, np.float32)


def _signs(d: int) -> Float32s:
    """-1 where bit 16 of `i * 2654435761` is set, 1 elsewhere."""
    hashed = np.arange(d, dtype=np.uint64) * np.uint64(_SIGN_HASH)
    flipped = hashed >> np.uint64(_SIGN_BIT) & np.uint64(1)
    return np.where(flipped == 1, np.float32(-1), np.float32(1))
