"""Bytes of a row of cache elements in each storage type. Scales of quantised blocks are included.

Source of the widths: the block layouts of ggml (`block_q8_0` and its kin), each for 32 elements: q8_0 is 32 bytes and
one f16 scale, q4_0 16 bytes and one scale, q5_0 four bytes more for the fifth bits, `_1` types a second f16 for the
minimum.
"""

from __future__ import annotations

from typing import Final

from kvtape.capacity.errors import CapacityError, nearest

__all__ = ["BLOCK_ELEMENTS", "BYTES_PER_BLOCK", "KV_TYPES", "OPENVINO_BYTES", "row_bytes"]

BLOCK_ELEMENTS: Final = 32

BYTES_PER_BLOCK: Final = {
    "bf16": 64,
    "f16": 64,
    "f32": 128,
    "iq4_nl": 18,
    "q4_0": 18,
    "q4_1": 20,
    "q5_0": 22,
    "q5_1": 24,
    "q8_0": 34,
}
"""Storage type -> bytes of 32 elements."""

KV_TYPES: Final = tuple(sorted(BYTES_PER_BLOCK))
"""What llama.cpp stores a cache as."""

OPENVINO_BYTES: Final = {"bf16": 2, "f16": 2, "f32": 4, "u8": 1}
"""What OpenVINO stores a cache as -> bytes of an element; the scales of u8 rows are its rule's business."""

_PLAIN: Final = frozenset({"bf16", "f16", "f32"})


def row_bytes(kv_type: str, elements: int) -> int:
    """Bytes of one row. Raises CapacityError for an unknown type, or a row that a block type cannot hold."""
    if kv_type == "u8":
        return elements
    width = BYTES_PER_BLOCK.get(kv_type)
    if width is None:
        names = (*KV_TYPES, "u8")
        raise CapacityError(f"KV type {kv_type!r} is unknown{nearest(kv_type, names)} choose from {', '.join(names)}")
    if elements % BLOCK_ELEMENTS and kv_type not in _PLAIN:
        raise CapacityError(
            f"a row of {elements} elements cannot be stored as {kv_type}, which packs {BLOCK_ELEMENTS} at a time; "
            "choose f16, bf16 or f32"
        )
    return elements * width // BLOCK_ELEMENTS
