"""Rotary position embedding as llama.cpp computes it: pairs, frequency factors, linear and YaRN scaling.

Formulas after `ggml_rope_ext` (ggml, MIT) and the YaRN paper (arXiv 2309.00071, section 3): component pair j of `dims`
turns by `position * frequency[j]`, and YaRN blends the plain and the interpolated frequency by how often the pair turns
within the trained context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvtape.capacity.model import RopePairs

__all__ = ["Rotary", "YarnScaling", "plain_frequencies", "yarn_frequencies"]

F = TypeVar("F", np.float32, np.float64)
Frequencies = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """`factor` times the `original` trained context; `attention` multiplies the magnitude that YaRN gives."""

    factor: float
    original: int
    attention: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Turns heads. `frequencies` `[dims / 2]` in radians a position; `magnitude` multiplies what is turned."""

    frequencies: Frequencies
    pairs: RopePairs
    magnitude: float = 1.0

    def rotate(self, heads: npt.NDArray[F], positions: npt.NDArray[np.int64]) -> npt.NDArray[F]:
        """A copy of `heads` `[n, n_heads, head_dim]`, row i turned by `positions[i]`; further components stay."""
        return self._turned(heads, positions, self.magnitude)

    def turn(self, heads: npt.NDArray[F], by: npt.NDArray[np.int64]) -> npt.NDArray[F]:
        """The same for rows that were rotated before: on by `by[i]` positions (back where negative), and no larger."""
        return self._turned(heads, by, 1.0)

    def _turned(self, heads: npt.NDArray[F], positions: npt.NDArray[np.int64], magnitude: float) -> npt.NDArray[F]:
        # In float64: at position 8,000 a float32 product of position and frequency is already off by 5e-4.
        angles = positions[:, None, None] * self.frequencies
        cos = (np.cos(angles) * magnitude).astype(heads.dtype)
        sin = (np.sin(angles) * magnitude).astype(heads.dtype)
        out = heads.copy()
        first, second = self._slices()
        a, b = heads[..., first], heads[..., second]
        out[..., first] = a * cos - b * sin
        out[..., second] = a * sin + b * cos
        return out

    def _slices(self) -> tuple[slice, slice]:
        half = len(self.frequencies)
        if self.pairs == "interleaved":
            return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        return slice(0, half), slice(half, 2 * half)


def plain_frequencies(base: float, dims: int, factors: npt.NDArray[np.float32] | None = None) -> Frequencies:
    """`base ** (-2j / dims)`, each divided by its entry of `factors` `[dims / 2]` (Llama 3's long-context table)."""
    frequencies = base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    return frequencies if factors is None else frequencies / factors


def yarn_frequencies(plain: Frequencies, base: float, dims: int, yarn: YarnScaling) -> tuple[Frequencies, float]:
    """Frequencies and magnitude under YaRN: fast pairs keep theirs, slow ones are interpolated, a ramp between."""
    low = max(0.0, math.floor(_turns_at(yarn.beta_fast, base, dims, yarn.original)))
    high = min(dims - 1.0, math.ceil(_turns_at(yarn.beta_slow, base, dims, yarn.original)))
    ramp = 1.0 - np.clip((np.arange(dims // 2) - low) / max(0.001, high - low), 0.0, 1.0)
    blended = plain / yarn.factor * (1.0 - ramp) + plain * ramp
    return blended, yarn.attention * (1.0 + 0.1 * math.log(yarn.factor))


def _turns_at(turns: float, base: float, dims: int, original: int) -> float:
    """The pair that turns `turns` times within `original` positions."""
    return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
