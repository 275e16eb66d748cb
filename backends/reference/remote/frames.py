"""Binary frames of feed-forward rows: what `RemoteFfn` sends and `FfnServer` answers, in the same form.

    magic "KTFF" | version u16 | 0 u16 | layer u32 | rows u32 | width u32 | CRC-32 of the rows u32 | model 16 bytes
    rows: float32 [rows, width]

Everything is little-endian. `model` says of which weights the rows are: rows of one model sent to the server of another
are an error, however well the sizes fit.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.weights import Weights

__all__ = ["CONTENT_TYPE", "HEADER_BYTES", "MAX_ROWS", "FfnFrame", "FrameError", "frame_bytes", "model_key"]

CONTENT_TYPE: Final = "application/vnd.kvtape.ffn"
"""No browser sends it without asking first, and the server answers no such question."""

MAX_ROWS: Final = 2048
"""Of one frame."""

_HEADER: Final = struct.Struct("<4sHHIIII16s")
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = b"KTFF"
_VERSION: Final = 1


class FrameError(ValueError):
    """What is wrong with a frame, in one line."""


@dataclass(frozen=True, slots=True, eq=False)
class FfnFrame:
    """`rows` `[n, n_embd]` for, or from, `layer` of the model with key `model`."""

    layer: int
    model: bytes
    rows: Floats

    def encode(self) -> bytes:
        body = np.ascontiguousarray(self.rows, "<f4").tobytes()
        n, width = self.rows.shape
        return _HEADER.pack(_MAGIC, _VERSION, 0, self.layer, n, width, zlib.crc32(body), self.model) + body

    @classmethod
    def decode(cls, data: bytes) -> FfnFrame:
        """Raises FrameError for anything but one whole, undamaged frame."""
        if len(data) < HEADER_BYTES:
            raise FrameError(f"{len(data)} bytes are no frame")
        magic, version, _, layer, n, width, crc, model = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION:
            raise FrameError(f"no frame of version {_VERSION}")
        if not 0 < n <= MAX_ROWS or len(data) != frame_bytes(n, width):
            raise FrameError(f"{len(data)} bytes for a frame of {n} rows of {width}")
        body = memoryview(data)[HEADER_BYTES:]
        if zlib.crc32(body) != crc:
            raise FrameError("the rows were damaged on their way")
        rows: npt.NDArray[np.float32] = np.frombuffer(body, "<f4").reshape(n, width).astype(np.float32)
        return cls(layer, model, rows)


def frame_bytes(n_rows: int, width: int) -> int:
    return HEADER_BYTES + 4 * n_rows * width


def model_key(weights: Weights) -> bytes:
    """16 bytes of the model's fingerprint."""
    return hashlib.blake2b(weights.architecture.shape.fingerprint.encode(), digest_size=16).digest()
