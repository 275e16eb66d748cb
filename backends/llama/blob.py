"""llama.cpp's sequence state as bytes: parse it, reorder it, build it. Pure; knows no library.

    u32 magic  i32 sequence                      a sequence state; a whole state has u32 n, n bytes of arch instead
    then per cache (a windowed model has two, full and windowed, back to back):
    u32 n_stream = 1
      u32 n_cells                                0 ends the cache here
      per cell  i32 position  u32 n_seq = 1  [i32 x, i32 y, i32 token: M-RoPE only]  i32 sequence
      u32 v_trans  u32 n_layer
      per layer K  i32 type  u64 row bytes  rows
      per layer V  i32 type  u64 row bytes  rows                             v_trans = 0; none in a latent cache
                   i32 type  u32 element bytes  u32 width  width x n_cells   v_trans = 1, transposed

Little endian. A hybrid's attention cache is followed by its recurrent state, which is not parsed (`rest`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import StateRejected
from kvtape.backends.llama.kv_types import numbers

__all__ = [
    "Cache",
    "LayerRows",
    "SequenceState",
    "build_sequence",
    "cells_size",
    "parse_cells",
    "parse_sequence",
    "parse_whole",
]

_MAGIC: Final = 0xAF143CD8
_SEQUENCE_HEADER = struct.Struct("<Ii")
_CELL = np.dtype([("position", "<i4"), ("n_seq", "<u4"), ("sequence", "<i4")])
_CELL_EXTENDED = np.dtype([("position", "<i4"), ("n_seq", "<u4"), ("extra", "<i4", (3,)), ("sequence", "<i4")])
_ELEMENT_BYTES: Final = {0: 4, 1: 2, 30: 2}

Bytes2d = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class LayerRows:
    """One layer's keys or values: ggml type and raw rows, uint8 `[n_cells, row bytes]`, never transposed."""

    ggml_type: int
    rows: Bytes2d

    def numbers(self) -> npt.NDArray[Any]:
        """`[n_cells, width]` as `kv_types.numbers`: f16 rows as float16, every other type as float32."""
        return numbers(self.ggml_type, self.rows)


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache's cells in storage order. `extra` int32 `[n_cells, 3]` on M-RoPE models, else None."""

    positions: npt.NDArray[np.int32]
    sequences: npt.NDArray[np.int32]
    extra: npt.NDArray[np.int32] | None
    v_trans: bool
    keys: tuple[LayerRows, ...]
    values: tuple[LayerRows, ...]

    def take(self, order: npt.NDArray[np.intp]) -> Cache:
        """The cells at these indices, in that order."""
        return replace(
            self,
            positions=self.positions[order],
            sequences=self.sequences[order],
            extra=None if self.extra is None else self.extra[order],
            keys=tuple(LayerRows(k.ggml_type, k.rows[order]) for k in self.keys),
            values=tuple(LayerRows(v.ggml_type, v.rows[order]) for v in self.values),
        )


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A parsed sequence state; `rest` is what follows the parsed caches."""

    sequence: int
    caches: tuple[Cache, ...]
    rest: bytes = b""


def parse_sequence(
    state: bytes, *, extended: bool = False, latent: bool = False, n_caches: int | None = None
) -> SequenceState:
    """Parse a sequence state. `n_caches` None reads caches to the last byte; a `latent` cache has no value rows.

    Raises StateRejected when the bytes are not in this layout, naming the offset.
    """
    reader = _Reader(state)
    magic, sequence = reader.unpack(_SEQUENCE_HEADER)
    if magic != _MAGIC:
        raise StateRejected(f"not a llama.cpp sequence state: it begins with {magic:#x}")
    return SequenceState(sequence, _caches(reader, extended, latent, n_caches), reader.rest())


def parse_whole(state: bytes, *, extended: bool = False, latent: bool = False) -> tuple[Cache, ...]:
    """The caches of a whole-context state. Raises StateRejected."""
    reader = _Reader(state)
    reader.take(reader.u32())
    return _caches(reader, extended, latent, None)


def build_sequence(state: SequenceState) -> bytes:
    """The bytes that `parse_sequence` reads: its inverse."""
    parts = [_SEQUENCE_HEADER.pack(_MAGIC, state.sequence)]
    for cache in state.caches:
        parts += _cache_parts(cache)
    parts.append(state.rest)
    return b"".join(parts)


def cells_size(n_cells: int, *, extended: bool = False) -> int:
    """Bytes from the start of a sequence state to the end of its first cache's cell list."""
    return _SEQUENCE_HEADER.size + 8 + n_cells * (_CELL_EXTENDED if extended else _CELL).itemsize


def parse_cells(start: bytes, *, extended: bool = False) -> npt.NDArray[np.int32] | int:
    """Positions of the first cache's cells from the start of a sequence state.

    When the state has another number of cells than fit in `start`, that number instead.
    """
    reader = _Reader(start)
    reader.unpack(_SEQUENCE_HEADER)
    reader.one_stream()
    n_cells = reader.u32()
    if len(start) != cells_size(n_cells, extended=extended):
        return n_cells
    return _cells(reader, n_cells, extended)[0]


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def done(self) -> bool:
        return self._at == len(self._data)

    def take(self, n_bytes: int) -> memoryview:
        if self._at + n_bytes > len(self._data):
            raise StateRejected(f"state ends at byte {len(self._data)}; {n_bytes} more expected at {self._at}")
        part = memoryview(self._data)[self._at : self._at + n_bytes]
        self._at += n_bytes
        return part

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def i32(self) -> int:
        return int.from_bytes(self.take(4), "little", signed=True)

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def one_stream(self) -> None:
        at = self._at
        n_streams = self.u32()
        if n_streams != 1:
            raise StateRejected(f"state has {n_streams} streams at byte {at}; kvtape's contexts are unified (1)")

    def rest(self) -> bytes:
        return self._data[self._at :]


def _caches(reader: _Reader, extended: bool, latent: bool, n_caches: int | None) -> tuple[Cache, ...]:
    caches: list[Cache] = []
    while not reader.done if n_caches is None else len(caches) < n_caches:
        caches.append(_cache(reader, extended, latent))
    return tuple(caches)


def _cache(reader: _Reader, extended: bool, latent: bool) -> Cache:
    reader.one_stream()
    n_cells = reader.u32()
    positions, sequences, extra = _cells(reader, n_cells, extended)
    if n_cells == 0:
        return Cache(positions, sequences, extra, False, (), ())
    v_trans, n_layer = reader.u32(), reader.u32()
    if v_trans not in (0, 1):
        raise StateRejected(f"state has v_trans {v_trans}")
    keys = tuple(_rows(reader, n_cells) for _ in range(n_layer))
    n_values = 0 if latent else n_layer
    values = tuple((_rows_transposed if v_trans else _rows)(reader, n_cells) for _ in range(n_values))
    return Cache(positions, sequences, extra, bool(v_trans), keys, values)


def _cells(
    reader: _Reader, n_cells: int, extended: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32] | None]:
    layout = _CELL_EXTENDED if extended else _CELL
    cells = np.frombuffer(reader.take(n_cells * layout.itemsize), layout)
    if np.any(cells["n_seq"] != 1):
        raise StateRejected("a cell belongs to another number of sequences than one")
    return cells["position"].copy(), cells["sequence"].copy(), cells["extra"].copy() if extended else None


def _rows(reader: _Reader, n_cells: int) -> LayerRows:
    ggml_type, row_bytes = reader.i32(), reader.u64()
    raw = np.frombuffer(reader.take(row_bytes * n_cells), np.uint8)
    return LayerRows(ggml_type, raw.reshape(n_cells, row_bytes).copy())


def _rows_transposed(reader: _Reader, n_cells: int) -> LayerRows:
    ggml_type, element_bytes, width = reader.i32(), reader.u32(), reader.u32()
    raw = np.frombuffer(reader.take(width * n_cells * element_bytes), np.uint8)
    by_cell = raw.reshape(width, n_cells, element_bytes).transpose(1, 0, 2)
    return LayerRows(ggml_type, np.ascontiguousarray(by_cell).reshape(n_cells, width * element_bytes))


def _cache_parts(cache: Cache) -> list[bytes]:
    n_cells = len(cache.positions)
    cells = np.zeros(n_cells, _CELL if cache.extra is None else _CELL_EXTENDED)
    cells["position"], cells["n_seq"], cells["sequence"] = cache.positions, 1, cache.sequences
    if cache.extra is not None:
        cells["extra"] = cache.extra
    parts = [struct.pack("<II", 1, n_cells), cells.tobytes()]
    if n_cells == 0:
        return parts
    parts.append(struct.pack("<II", cache.v_trans, len(cache.keys)))
    parts += _layer_parts(cache.keys, transposed=False)
    parts += _layer_parts(cache.values, transposed=cache.v_trans)
    return parts


def _layer_parts(layers: Sequence[LayerRows], *, transposed: bool) -> list[bytes]:
    parts: list[bytes] = []
    for layer in layers:
        n_cells, row_bytes = layer.rows.shape
        if not transposed:
            parts += [struct.pack("<iQ", layer.ggml_type, row_bytes), layer.rows.tobytes()]
            continue
        size = _ELEMENT_BYTES[layer.ggml_type]
        by_width = layer.rows.reshape(n_cells, row_bytes // size, size).transpose(1, 0, 2)
        parts += [struct.pack("<iII", layer.ggml_type, size, row_bytes // size), by_width.tobytes()]
    return parts
