"""What llama.cpp stores a cache as, which pairs of types it takes, and packed rows as numbers.

Every pair was tried with flash attention off, on and auto: what is not refused here opens and computes. Types outside
this list abort or crash the process, some at creation, some at the first decode.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import StateRejected, UsageError
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.rounding import PACKED_TYPES
from kvtape.capacity.geometry import LayerGroup, LayerKind
from kvtape.capacity.model import ModelShape
from kvtape.capacity.widths import BLOCK_ELEMENTS
from kvtape.planner.grammar import nearest

__all__ = ["GGML_TYPES", "NARROW", "check_kv_types", "numbers"]

GGML_TYPES: Final = {
    "bf16": 30,
    "f16": 1,
    "f32": 0,
    "iq4_nl": 20,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
}
"""Storage type -> number in ggml's enum."""

NARROW: Final = PACKED_TYPES - {"q8_0"}
"""Packed types below 8 bits a number."""

_F32, _F16, _BF16 = (GGML_TYPES[name] for name in ("f32", "f16", "bf16"))
_PACKED_NUMBERS: Final = frozenset(GGML_TYPES[name] for name in PACKED_TYPES)


def check_kv_types(config: SessionConfig, shape: ModelShape) -> None:
    """Raises UsageError for what the engine does not open, or opens and computes wrongly, with what to ask for."""
    k, v = config.kv_type_k, config.kv_type_v
    for name, kv_type in (("kv_type_k", k), ("kv_type_v", v)):
        if kv_type not in GGML_TYPES:
            hint = nearest(kv_type, GGML_TYPES).removeprefix(", ").rstrip(";") or "choose one of these"
            raise UsageError(f"{name} {kv_type}: this backend opens {', '.join(sorted(GGML_TYPES))}; {hint}")
    groups = [g for g in shape.geometry.groups if g.kind not in (LayerKind.RECURRENT, LayerKind.SHARED) and g.count]
    if not groups:
        return
    if v in PACKED_TYPES and config.flash_attention == "off":
        raise UsageError(
            f"kv_type_v {v}: llama.cpp packs values only under flash attention; ask for flash attention on or auto, or "
            "for values as f16, bf16 or f32"
        )
    if k != v and any(g.kind is LayerKind.LATENT for g in groups):
        raise UsageError(f"kv_type_k {k}, kv_type_v {v}: this model keeps one latent row for both; ask for one type")
    for group in groups:
        _check_heads("kv_type_k", k, group, group.k_elems)
        _check_heads("kv_type_v", v, group, group.v_elems)


def _check_heads(name: str, kv_type: str, group: LayerGroup, elements: int) -> None:
    # A block that two heads shared would be read at half its bytes: garbage without an error, or an abort.
    head = elements // group.heads
    if kv_type in PACKED_TYPES and head % BLOCK_ELEMENTS:
        raise UsageError(
            f"{name} {kv_type} packs {BLOCK_ELEMENTS} numbers of a head at a time, one of this model has {head}; ask "
            "for f16, bf16 or f32"
        )


def numbers(ggml_type: int, rows: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Raw rows, uint8 `[n, row bytes]`, as numbers `[n, width]`: float16 of f16, float32 of every other type, exact.

    Raises StateRejected for a type that no session of this backend stores.
    """
    if ggml_type == _F32:
        return rows.view(np.float32)
    if ggml_type == _F16:
        return rows.view(np.float16)
    if ggml_type == _BF16:
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if ggml_type in _PACKED_NUMBERS:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        found: npt.NDArray[Any] = dequantize(rows, GGMLQuantizationType(ggml_type))
        return found
    raise StateRejected(f"rows of ggml type {ggml_type} cannot be read as numbers")
