"""How rows read back from the engine's store, to the bit: the only witness of its storage types.

The state API gives values, never the storage, and what a compiled model answers about its KV types is what it was
asked for, not what it does. So a type is known by what it makes of rows whose values are known:

    f32    every bit
    f16    rounded to half precision
    bf16   rounded to bfloat16; only where the engine computes in bf16 too
    u8     256 levels between the smallest and the largest component of a row and head

u8, per row and head, in f32: `step = (max - min) / 255`, `zero = -min / step`; the level of x is the nearest integer
to `x / step + zero`, computed as one fused multiply-add with `1 / step`; it reads back as `(level - zero) * step`. No
read value is more than 0.50002 steps from what was stored. Where the engine computes in bf16, rows are rounded to that
first. Measured on OpenVINO 2026.4.1 with AVX-512 over 8 million elements, halves between two levels among them: no
bit differs. `Compiled` repeats that at every compile and refuses a processor that rounds otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtape.backends.openvino.rope import F32

__all__ = ["PAIRS", "Storage", "ladder"]

PAIRS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "f32": (("f32", "f32"), ("f16", "f16"), ("u8", "u8"), ("f32", "u8"), ("u8", "f32")),
    "bf16": (("bf16", "bf16"), ("u8", "u8"), ("bf16", "u8"), ("u8", "bf16")),
}
"""By the type that the engine computes in, what it really keeps (keys, values) as when asked for it. Any other pair of
f32, f16, bf16 and u8 is accepted in silence and kept as something else: f16 and bf16 become the type of inference."""

_BLOCK_ROWS: Final = 1 << 14
"""So many rows at a time are quantised: the wide product of a head of 64 then takes 8 MB."""


@dataclass(frozen=True, slots=True)
class Storage:
    """What the engine makes of keys, or of values, when it keeps them as `kv_type` and computes in `inference`."""

    kv_type: str
    inference: str = "f32"

    @property
    def keeps_every_bit(self) -> bool:
        return self.kv_type == "f32" and self.inference == "f32"

    def written(self, rows: F32) -> F32:
        """What to write for `rows` `[..., head_dim]` so that the engine holds what it held when it computed them: its
        states take f32 and round it to `kv_type` alone."""
        return _bf16(rows) if self.inference == "bf16" else rows

    def stored(self, rows: F32) -> F32:
        """`rows` `[..., head_dim]` as they read back; the same array where nothing is rounded."""
        rows = self.written(rows)
        if self.kv_type == "f16":
            return rows.astype(np.float16).astype(np.float32)
        return _u8(rows) if self.kv_type == "u8" else rows


def ladder(layers: int, heads: int, head_dim: int, n: int = 64) -> F32:
    """Rows `[layers, n, heads, head_dim]` whose components lie on or halfway between two levels of u8, nearly.

    What a store makes of them tells a fused multiply-add from two roundings: 4 of 10,000 components come out one
    level apart.
    """
    rng = np.random.default_rng(20260)
    return np.asarray(np.round(rng.uniform(size=(layers, n, heads, head_dim)) * 510) / 2, np.float32)


def _bf16(rows: F32) -> F32:
    """Rounded to nearest, ties to even, as the upper half of the bits of f32; of finite values."""
    bits = np.ascontiguousarray(rows).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)).view(np.float32)


def _u8(rows: F32) -> F32:
    flat = np.ascontiguousarray(rows).reshape(-1, rows.shape[-1])
    out = np.empty_like(flat)
    for at in range(0, len(flat), _BLOCK_ROWS):
        part = slice(at, at + _BLOCK_ROWS)
        out[part] = _on_levels(flat[part])
    return out.reshape(rows.shape)


def _on_levels(rows: F32) -> F32:
    low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
    step = (high - low) / np.float32(255)
    step[step == 0] = np.float32(1e-4)
    zero = -low / step
    # A product of two f32 is exact in f64: what is rounded to f32 here is the fused sum.
    fused = (rows.astype(np.float64) * (np.float32(1) / step) + zero).astype(np.float32)
    level = np.clip(np.rint(fused), np.float32(0), np.float32(255))
    return np.asarray((level - zero) * step, np.float32)
