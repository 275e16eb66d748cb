"""Canonical bytes of rows: what the digests are taken over.

They depend on the values alone, not on Arrow's buffers, chunks or dictionaries, nor on DuckDB's storage:

    table    u64 rows, then each column
    column   u32 length + name, one byte N (all null), A (none null) or M (mixed), for M one byte per row (1 = there),
             then the values, little-endian; null values count as 0 or empty
             a column of a later schema version than 1 that is all null has no bytes, not even its name
    text     u32 length of each, then all UTF-8 bytes;   enumerations are their text
    tokens   u32 length of each, then all i32;   floats likewise, then all f32
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvtape.planner.fields import Field, Kind
from kvtape.traces.schema import Table

__all__ = [
    "LISTS",
    "NUMBERS",
    "column_bytes",
    "in_canonical_order",
    "is_in_canonical_order",
    "plain_array",
    "table_bytes",
    "table_digest",
]

Chunk = bytes | memoryview

NUMBERS: dict[Kind, str] = {"u64": "<u8", "i64": "<i8", "f64": "<f8"}
LISTS: dict[Kind, str] = {"tokens": "<i4", "floats": "<f4"}


def table_digest(fields: Iterable[Field], rows: pa.Table) -> bytes:
    """SHA-256 over `table_bytes`; `rows` must be in canonical order."""
    digest = hashlib.sha256()
    for chunk in table_bytes(fields, rows):
        digest.update(chunk)
    return digest.digest()


def table_bytes(fields: Iterable[Field], rows: pa.Table) -> Iterator[Chunk]:
    """Canonical bytes of the columns `fields` of `rows`, in that order."""
    yield struct.pack("<Q", rows.num_rows)
    for field in fields:
        column = rows.column(field.name)
        if field.since > 1 and column.null_count == len(column):
            continue
        name = field.name.encode()
        yield struct.pack("<I", len(name)) + name
        yield from column_bytes(column, field)


def column_bytes(column: pa.ChunkedArray | pa.Array, field: Field) -> Iterator[Chunk]:
    """Validity and values of one column."""
    array = plain_array(column)
    if array.null_count == len(array):
        yield b"N"
        return
    if array.null_count:
        yield b"M"
        yield pc.is_valid(array).to_numpy(zero_copy_only=False).astype(np.uint8).tobytes()
    else:
        yield b"A"
    yield from _values(array, field)


def plain_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """One array without dictionary."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # an empty column keeps no chunk to combine
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _values(array: pa.Array, field: Field) -> Iterator[Chunk]:
    if field.kind in LISTS:
        lengths = pc.fill_null(pc.list_value_length(array), 0)
        yield _fixed(lengths, "<u4")
        yield _fixed(array.flatten(), LISTS[field.kind])
    elif field.kind in NUMBERS:
        yield _fixed(array, NUMBERS[field.kind])
    elif field.kind == "bool":
        yield pc.fill_null(array, False).to_numpy(zero_copy_only=False).astype(np.uint8).tobytes()
    else:
        yield from _text(array)


def _fixed(array: pa.Array, dtype: str) -> Chunk:
    filled = pc.fill_null(array, 0) if array.null_count else array
    raw: bytes = filled.to_numpy(zero_copy_only=False).astype(dtype, copy=False).tobytes()
    return raw


def _text(array: pa.Array) -> Iterator[Chunk]:
    filled = pc.fill_null(array, "") if array.null_count else array
    width = np.int64 if pa.types.is_large_string(filled.type) else np.int32
    _, offset_buffer, data = filled.buffers()
    offsets = np.frombuffer(offset_buffer, width)[filled.offset : filled.offset + len(filled) + 1]
    yield np.diff(offsets).astype("<u4").tobytes()
    if data is not None:
        yield memoryview(data)[int(offsets[0]) : int(offsets[-1])]


def in_canonical_order(table: Table, rows: pa.Table) -> pa.Table:
    """`rows` sorted by the table's order; returned as they are when they already are sorted."""
    if is_in_canonical_order(table, rows):
        return rows
    return rows.take(pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in table.order]))


def is_in_canonical_order(table: Table, rows: pa.Table, *first: str) -> bool:
    """Whether the rows go up by the columns `first` and then by the table's order, none of them equal to the next."""
    if rows.num_rows < 2:
        return True
    alike: npt.NDArray[np.bool_] = np.ones(rows.num_rows - 1, np.bool_)
    for name in (*first, *table.order):
        array = plain_array(rows.column(name))
        before, after = array[:-1], array[1:]
        if (alike & _flags(pc.greater(before, after))).any():
            return False
        alike &= _flags(pc.equal(before, after))
    return not alike.any()


def _flags(array: pa.Array) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = array.to_numpy(zero_copy_only=False)
    return found
