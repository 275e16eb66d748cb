"""Reading rows of a table in canonical order over an open connection."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import duckdb
import pyarrow as pa

from kvtape.traces.codec import from_arrow
from kvtape.traces.schema import Table, quoted

__all__ = ["empty_columns", "order_by", "select_arrow", "select_rows"]


def order_by(table: Table, *first: str) -> str:
    """ORDER BY clause of the canonical order, after the columns `first`."""
    return "ORDER BY " + ", ".join(quoted(c) for c in (*first, *table.order))


def select_arrow(
    connection: duckdb.DuckDBPyConnection,
    table: Table,
    where: str = "true",
    params: Sequence[Any] = (),
    *,
    by_batch: bool = False,
    ordered: bool = True,
    empty: Collection[str] = (),
) -> pa.Table:
    """Columns of `table` plus `batch`, rows in canonical order or as they lie, of batch after batch if asked.

    Enumerations come as Arrow dictionaries.
    `empty`: columns known to hold nothing (`empty_columns`) are not read, and come last, as Arrow nulls.
    """
    names = [c for c in (*table.columns, "batch") if c not in empty]
    columns = ", ".join(map(quoted, names))
    order = order_by(table, *(["batch"] if by_batch else [])) if ordered else ""
    query = f"SELECT {columns} FROM {table.name} WHERE {where} {order}"
    rows = connection.sql(query, params=list(params)).to_arrow_table()
    for name in empty:
        rows = rows.append_column(name, pa.nulls(rows.num_rows))
    return rows


def empty_columns(connection: duckdb.DuckDBPyConnection, table: Table) -> list[str]:
    """Columns without a value in any row; of most tables of most logs that is half of them."""
    names = [f.name for f in table.fields if f.nullable]
    if not names:
        return []
    counts = ", ".join(f"count({quoted(name)})" for name in names)
    found = connection.execute(f"SELECT {counts} FROM {table.name}").fetchall()[0]
    return [name for name, count in zip(names, found, strict=True) if not count]


def select_rows(
    connection: duckdb.DuckDBPyConnection,
    table: Table,
    where: str = "true",
    params: Sequence[Any] = (),
) -> list[Any]:
    """The same as dataclasses of `table.row`."""
    return from_arrow(table, select_arrow(connection, table, where, params))
