"""Older logs in the shape of today: what later schema versions brought is there, and holds nothing.

Old rows are never rewritten. Every query over an older log, whoever asks, reads its tables through these relations:
a column that its version did not have is NULL, never 0, and a table that it did not have is empty. The field tables
say which version brought what (`Field.since`). Chain and digests do not change with it (`canonical`).
"""

from __future__ import annotations

import duckdb

from kvtape.traces.schema import ENUMS, ROW_TABLES, SCHEMA_VERSION, Table, quoted, sql_type
from kvtape.traces.views import VIEWS

__all__ = ["bring_up", "columns_of", "no_rows"]


def bring_up(connection: duckdb.DuckDBPyConnection, version: int) -> None:
    """Shadow the tables and views of an open log of schema `version` by temporary views in the shape of today.

    They are this connection's alone and go with it; cursors of it see the file as it is. Raises duckdb.Error.
    """
    if version >= SCHEMA_VERSION:
        return
    name = connection.execute("SELECT current_database()").fetchall()[0][0]
    for table in ROW_TABLES:
        if table.since > version:
            connection.execute(f"CREATE TEMP VIEW {table.name} AS {no_rows(table)}")
        elif any(f.since > version for f in table.fields):
            rows = f"{quoted(name)}.main.{table.name}"
            columns = ", ".join([*columns_of(table, version), "batch"])
            connection.execute(f"CREATE TEMP VIEW {table.name} AS SELECT {columns} FROM {rows}")
    for view in VIEWS:
        connection.execute(f"CREATE TEMP VIEW {view.name} AS {view.sql}")


def columns_of(table: Table, version: int, *, enums_as_text: bool = False) -> list[str]:
    """The columns of today, as SQL over a table of schema `version`."""
    found = []
    for field in table.fields:
        kind = "VARCHAR" if enums_as_text and field.kind in ENUMS else sql_type(field)
        value = quoted(field.name) if field.since <= version else "NULL"
        found.append(
            value if kind == sql_type(field) and value != "NULL" else f"{value}::{kind} AS {quoted(field.name)}"
        )
    return found


def no_rows(table: Table, *, enums_as_text: bool = False) -> str:
    """A query with the columns of a table, its batch, and no rows."""
    nothing = columns_of(table, 0, enums_as_text=enums_as_text)
    return f"SELECT {', '.join(nothing)}, NULL::UBIGINT AS batch WHERE false"
