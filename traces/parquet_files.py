"""A log as Parquet files: what fleets keep, partitioned so that a day or a session is read alone.

    OUT/meta.parquet, OUT/batches.parquet, OUT/runs.parquet, OUT/trials.parquet
    OUT/<table>/day=1970-01-01/session=main/*.parquet          every other table; `day` is that of the session's begin

The files have the columns of the tables, `batch` too, so that the chain can be checked over them.
"""

from __future__ import annotations

from pathlib import Path

import duckdb

from kvtape.traces.errors import LogExists
from kvtape.traces.leftovers import claimed
from kvtape.traces.query import order_by
from kvtape.traces.schema import ROW_TABLES, Table, quoted
from kvtape.traces.sidecar import fsync_dir

__all__ = ["PARTITIONED", "file_glob", "write_parquet"]

PARTITIONED = tuple(t for t in ROW_TABLES if "session_id" in t.columns and t.name != "trials")
"""The tables whose rows lie in a folder for each day and session."""

_DAYS = """
    CREATE TEMP TABLE days AS
    SELECT run_id, session_id, strftime(make_timestamp(((any_value(begun) + min(at_ns)) // 1000)::BIGINT), '%Y-%m-%d')
        AS day
    FROM events JOIN (
        -- Imported events count from the run's beginning, which is a moment on the source's clock.
        SELECT run_id, CASE WHEN kind = 'import' THEN started_at_ns ELSE 0 END AS begun FROM runs) USING (run_id)
    GROUP BY ALL
"""


def file_glob(out: str, table: str) -> str:
    """Where the files of a table lie."""
    flat = table in ("meta", "batches") or all(t.name != table for t in PARTITIONED)
    return f"{out}/{table}.parquet" if flat else f"{out}/{table}/*/*/*.parquet"


def write_parquet(connection: duckdb.DuckDBPyConnection, out: Path) -> None:
    """Write every row of an open log, which must not be confined, to the new folder `out`; whole or not at all.

    Raises LogExists, OSError, duckdb.Error.
    """
    if out.exists():
        raise LogExists(f"{out}: already there; kvtape writes over nothing, choose another folder")
    with claimed(out) as fresh:
        fresh.mkdir()
        connection.execute(_DAYS)
        try:
            for name in ("meta", "batches"):
                key = "key" if name == "meta" else "batch"
                _copy(connection, f"SELECT * FROM {name} ORDER BY {key}", fresh / f"{name}.parquet", "")
            for table in ROW_TABLES:
                if table in PARTITIONED:
                    _copy_partitioned(connection, table, fresh / table.name)
                else:
                    query = f"SELECT * FROM {table.name} {order_by(table)}"
                    _copy(connection, query, fresh / f"{table.name}.parquet", "")
        finally:
            connection.execute("DROP TABLE days")
        fresh.rename(out)
    fsync_dir(out.parent)


def _copy_partitioned(connection: duckdb.DuckDBPyConnection, table: Table, target: Path) -> None:
    columns = ", ".join(f"t.{quoted(c)}" for c in (*table.columns, "batch"))
    query = (
        f"SELECT {columns}, coalesce(d.day, '1970-01-01') AS day, t.session_id AS session FROM {table.name} t "
        f"LEFT JOIN days d ON d.run_id = t.run_id AND d.session_id = t.session_id {order_by(table)}"
    )
    if connection.execute(f"SELECT count(*) FROM {table.name}").fetchall()[0][0]:
        _copy(connection, query, target, ", PARTITION_BY (day, session)")


def _copy(connection: duckdb.DuckDBPyConnection, query: str, target: Path, more: str) -> None:
    name = str(target).replace("'", "''")
    connection.execute(f"COPY ({query}) TO '{name}' (FORMAT parquet, COMPRESSION zstd{more})")
