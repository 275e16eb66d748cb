"""Rows as dataclasses to and from Arrow columns.

Columns are built whole, not row by row: this is the path every recorded event takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import pyarrow as pa

from kvtape.planner.events import BlockRef
from kvtape.planner.fields import Field
from kvtape.traces.schema import ENUMS, EVENTS, Table, arrow_schema, arrow_type

__all__ = ["blocks_from_text", "blocks_text", "empty_table", "from_arrow", "to_arrow"]


def blocks_text(blocks: Iterable[BlockRef]) -> str:
    """`events.blocks`: JSON [[block_id, start, stop], ...]."""
    return json.dumps([[b.block_id, b.start, b.stop] for b in blocks], separators=(",", ":"))


def blocks_from_text(text: str) -> tuple[BlockRef, ...]:
    """Inverse of `blocks_text`. Raises ValueError for anything else."""
    try:
        return tuple(BlockRef(int(i), int(start), int(stop)) for i, start, stop in json.loads(text))
    except (TypeError, ValueError) as err:
        raise ValueError(f"not a list of [block_id, start, stop]: {text[:80]!r}") from err


def to_arrow(table: Table, rows: Sequence[Any]) -> pa.Table:
    """Rows (dataclasses of `table.row`) as one Arrow table in column order.

    Raises OverflowError, TypeError or pyarrow.ArrowInvalid for a value that its column cannot hold.
    """
    if not rows:
        return empty_table(table)
    columns = zip(*map(attrgetter(*table.columns), rows), strict=True)
    arrays = [_array(table, field, values) for field, values in zip(table.fields, columns, strict=True)]
    return pa.Table.from_arrays(arrays, schema=arrow_schema(table))


def empty_table(table: Table) -> pa.Table:
    return arrow_schema(table).empty_table()


def _array(table: Table, field: Field, values: tuple[Any, ...]) -> pa.Array:
    kind = arrow_type(field)
    # Most columns of most batches are empty, and counting identities is far cheaper than converting them.
    if field.nullable and values.count(None) == len(values):
        return pa.nulls(len(values), kind)
    if table is EVENTS and field.name == "blocks":
        values = tuple(None if v is None else blocks_text(v) for v in values)
    return pa.array(values, kind)


def from_arrow(table: Table, data: pa.Table) -> list[Any]:
    """Dataclasses of `table.row`, one per row of `data`; columns that the row does not have are ignored."""
    names = table.columns
    columns = [_values(table, field, data.column(field.name)) for field in table.fields]
    row = table.row
    return [row(**dict(zip(names, values, strict=True))) for values in zip(*columns, strict=True)]


def _values(table: Table, field: Field, column: pa.ChunkedArray) -> list[Any]:
    values: list[Any] = column.to_pylist()
    convert = _converter(table, field)
    return values if convert is None else [None if v is None else convert(v) for v in values]


def _converter(table: Table, field: Field) -> Callable[[Any], Any] | None:
    if field.kind in ENUMS:
        return {member.value: member for member in ENUMS[field.kind]}.__getitem__
    if field.kind in ("tokens", "floats"):
        return tuple
    if table is EVENTS and field.name == "blocks":
        return blocks_from_text
    return None
