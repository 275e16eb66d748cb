"""How rows of floats are written where memory counts: plain, as bf16, or as q8_0 blocks.

Encoding and decoding are the gguf library's, so a coded row is what a GGUF tensor of that type would hold. A row is
encoded once and only ever decoded after that: a second encoding of a decoded row would add a second error.

| codec | bytes of a component | error of a component |
|---|---|---|
| `f32` | those of the engine's float | none |
| `bf16` | 2 | at most 2^-8 of itself |
| `q8_0` | 34 / 32 | at most 4e-6 + 1/200 of the largest of the 32 in its block |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtape.backends.reference.errors import ExecutionRefused
from kvtape.backends.reference.model.blas import Floats

__all__ = ["CODECS", "Coded", "RowCodec"]

_Q8_0_MOST: Final = 127 * float(np.finfo(np.float16).max)
"""A block's scale is a float16, and the largest component 127 of it."""

Coded = npt.NDArray[Any]
"""`[n, width]`: bytes, or the floats themselves under `f32`."""


@dataclass(frozen=True, slots=True)
class RowCodec:
    """`ggml`: the tensor type, empty for rows as they are. Rows must be a multiple of `block` components long."""

    name: str
    ggml: str = ""
    block: int = 1

    def encode(self, rows: Floats) -> Coded:
        """`rows` `[n, d]`, written; a copy. Raises ExecutionRefused for numbers that q8_0 has no scale for."""
        if not self.ggml:
            return rows.copy()
        if self.ggml == "Q8_0" and np.abs(rows).max(initial=0) > _Q8_0_MOST:
            raise ExecutionRefused(
                "unsupported", f"a row reaches {np.abs(rows).max():.3g}, q8_0 ends at {_Q8_0_MOST:.3g}"
            )
        import gguf

        return np.asarray(gguf.quants.quantize(np.ascontiguousarray(rows, np.float32), self._type()))

    def decode(self, coded: Coded, dtype: np.dtype[Any]) -> Floats:
        """Rows `[n, d]`, `n` at least 1, of what `encode` gave."""
        if not self.ggml:
            return coded.astype(dtype, copy=False)
        import gguf

        return np.asarray(gguf.quants.dequantize(np.ascontiguousarray(coded), self._type()), dtype)

    def empty(self, d: int, dtype: np.dtype[Any]) -> Coded:
        """No rows of `d` components: the shape and type of what `encode` gives."""
        return self.encode(np.zeros((1, d), dtype))[:0]

    def _type(self) -> Any:
        import gguf

        return gguf.GGMLQuantizationType[self.ggml]


CODECS: Final = {
    codec.name: codec for codec in (RowCodec("f32"), RowCodec("bf16", "BF16"), RowCodec("q8_0", "Q8_0", 32))
}
