"""Rotating key rows to other positions, and finding out from the engine itself how its keys rotate.

RoPE turns each pair of key components by `position * base**(-2 i / dims)`. Which components form a pair, and the
base, differ between architectures and sometimes between layers; a scaled RoPE is no such rotation at all. So the
convention is not looked up: one token alone (seeing only itself) at several positions has the same key in every layer
up to that rotation, and the first candidate that explains all of them is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtape.capacity.model import RopePairs

__all__ = ["PROBE_POSITIONS", "PROBE_TOLERANCE", "LayerRotation", "Rotation", "find_rotation", "rotate"]

PROBE_POSITIONS = (0, 1, 64, 1000)
"""The last ones tell slow pairs apart; far beyond them the engine's own f32 angles lose digits."""

PROBE_TOLERANCE = {"f32": 1e-4, "bf16": 2**-7}
"""By the type of inference: largest error relative to the largest key component. A right convention gives about 1e-5,
or 2e-3 where the engine itself turns in bf16 (which keeps 8 bits); a wrong one about 1."""

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LayerRotation:
    """How one layer rotates: which components form a pair, of the first `dims` components, to which base.

    `frequencies` in radians a position, one a pair, where the model has them as numbers; they count then, not the base.
    """

    pairs: RopePairs
    dims: int
    base: float
    frequencies: tuple[float, ...] = ()

    @property
    def turns(self) -> npt.NDArray[np.float64]:
        """Radians a position of each pair `[dims / 2]`."""
        if self.frequencies:
            return np.asarray(self.frequencies, np.float64)
        turns: npt.NDArray[np.float64] = self.base ** (-np.arange(self.dims // 2) * 2.0 / self.dims)
        return turns


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of every layer."""

    layers: tuple[LayerRotation, ...]

    def apply(self, keys: F32, delta: I64) -> F32:
        """`keys` `[layers, n, kv_heads, head_dim]` moved by `delta` `[n]` positions; delta 0 keeps every bit."""
        moved = np.flatnonzero(delta)
        if not moved.size:
            return keys
        out = keys.copy()
        for layer, how in enumerate(self.layers):
            out[layer, moved] = rotate(keys[layer, moved], delta[moved], how)
        return out


def rotate(keys: F32, delta: npt.NDArray[Any], how: LayerRotation) -> F32:
    """`keys` `[n, kv_heads, head_dim]` turned by `delta` `[n]` positions. Angles are taken in float64."""
    angles = np.asarray(delta, np.float64)[:, None] * how.turns
    cos = np.cos(angles).astype(np.float32)[:, None, :]
    sin = np.sin(angles).astype(np.float32)[:, None, :]
    first, second = _pair_slices(how)
    a, b = keys[..., first], keys[..., second]
    out = keys.copy()
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out


def _pair_slices(how: LayerRotation) -> tuple[slice, slice]:
    if how.pairs == "interleaved":
        return slice(0, how.dims, 2), slice(1, how.dims, 2)
    return slice(0, how.dims // 2), slice(how.dims // 2, how.dims)


def find_rotation(
    keys: F32,
    positions: Sequence[int],
    dims: int,
    bases: Sequence[float],
    tolerance: float = PROBE_TOLERANCE["f32"],
    frequencies: tuple[float, ...] = (),
) -> Rotation | str:
    """The rotation that explains `keys` `[layers, n, kv_heads, head_dim]`, one token alone at each of `positions`.

    `positions` begin with 0; each of `bases` is tried with both pairings, and before them `frequencies`, where
    the model has them. `tolerance` as in PROBE_TOLERANCE.
    Returns the reason when a layer has no such rotation.
    """
    delta = np.asarray(positions, np.int64)
    found: list[LayerRotation] = []
    candidates: list[tuple[float, tuple[float, ...]]] = [(base, ()) for base in dict.fromkeys(bases)]
    candidates += [(0.0, frequencies)] if frequencies else []
    for layer, rows in enumerate(keys):
        errors = {
            how: _error(rows, delta, how)
            for base, turns in candidates
            for how in (LayerRotation("interleaved", dims, base, turns), LayerRotation("halves", dims, base, turns))
        }
        # What the model has written down comes first: a base that explains its rows as well is no better known.
        written = [how for how in errors if how.frequencies and errors[how] <= tolerance]
        best = min(written or errors, key=lambda how: errors[how])
        if not errors[best] <= tolerance:
            return (
                f"in layer {layer} the keys of one token at positions {', '.join(map(str, positions))} are no plain "
                f"rotation of each other (smallest relative error {errors[best]:.1e}, allowed {tolerance:.0e})"
            )
        found.append(best)
    return Rotation(tuple(found))


def _error(rows: F32, delta: I64, how: LayerRotation) -> float:
    scale = float(np.abs(rows[0]).max())
    if not scale > 0.0:
        return float("inf")
    start = np.broadcast_to(rows[0], rows.shape)
    return float(np.abs(rotate(start, delta, how) - rows).max()) / scale
