"""Reading rows of a table in canonical order over an open connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import duckdb
import pyarrow as pa

from kvtape.traces.codec import from_arrow
from kvtape.traces.schema import SCHEMA_VERSION, Table, quoted
from kvtape.traces.upcast import upcast

__all__ = ["order_by", "select_arrow", "select_rows"]


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
    version: int = SCHEMA_VERSION,
) -> pa.Table:
    """Columns of `table` plus `batch`, rows in canonical order or as they lie, of batch after batch if asked.

    Enumerations come as Arrow dictionaries. `version`: the schema version of the log; older rows are brought up.
    """
    columns = ", ".join(quoted(c) for c in (*table.columns, "batch")) if version == SCHEMA_VERSION else "*"
    order = order_by(table, *(["batch"] if by_batch else [])) if ordered else ""
    query = f"SELECT {columns} FROM {table.name} WHERE {where} {order}"
    rows = connection.sql(query, params=list(params)).to_arrow_table()
    return upcast(table.name, rows, version)


def select_rows(
    connection: duckdb.DuckDBPyConnection,
    table: Table,
    where: str = "true",
    params: Sequence[Any] = (),
    *,
    version: int = SCHEMA_VERSION,
) -> list[Any]:
    """The same as dataclasses of `table.row`."""
    return from_arrow(table, select_arrow(connection, table, where, params, version=version))
