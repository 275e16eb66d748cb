"""A log as Parquet files: what fleets keep, partitioned so that a day or a session is read alone.

    OUT/meta.parquet, OUT/batches.parquet, OUT/runs.parquet, OUT/trials.parquet
    OUT/<table>/day=1970-01-01/session=main/*.parquet          every other table; `day` is that of the session's begin
                               session=main%2F..+0123456789abcdef   names too long for a folder: begin and hash

The files have the columns of the tables, `batch` too, so that the chain can be checked over them.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvtape.traces.errors import LogExists
from kvtape.traces.leftovers import claimed
from kvtape.traces.query import order_by
from kvtape.traces.schema import ROW_TABLES, Table, quoted, quoted_text
from kvtape.traces.sidecar import fsync_dir
from kvtape.traces.telling import Tell, silent

__all__ = ["PARTITIONED", "file_glob", "write_parquet"]

PARTITIONED = tuple(t for t in ROW_TABLES if "session_id" in t.columns and t.name != "trials")
"""The tables whose rows lie in a folder for each day and session."""

_ROWS = 65_536
"""Rows in memory at a time."""

_LONGEST_NAME = 240
"""Bytes of a session's name in a folder's: file systems take 255, of which `session=` is 8."""

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


def write_parquet(connection: duckdb.DuckDBPyConnection, out: Path, tell: Tell = silent) -> None:
    """Write every row of an open log, which must not be confined, to the new folder `out`; whole or not at all.

    Tells the tables that are written. Raises LogExists, OSError, duckdb.Error.
    """
    if out.exists():
        raise LogExists(f"{out}: already there; kvtape writes over nothing, choose another folder")
    with claimed(out) as fresh:
        fresh.mkdir()
        connection.execute(_DAYS)
        try:
            for name in ("meta", "batches"):
                key = "key" if name == "meta" else "batch"
                _copy(connection, f"SELECT * FROM {name} ORDER BY {key}", fresh / f"{name}.parquet")
            for done, table in enumerate(ROW_TABLES, 1):
                if table in PARTITIONED:
                    _copy_partitioned(connection, table, fresh / table.name)
                else:
                    query = f"SELECT * FROM {table.name} {order_by(table)}"
                    _copy(connection, query, fresh / f"{table.name}.parquet")
                tell(done, len(ROW_TABLES), "tables")
        finally:
            connection.execute("DROP TABLE days")
        try:
            fresh.rename(out)
        except OSError as err:
            if err.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise LogExists(f"{out}: already there; kvtape writes over nothing, choose another folder") from None
    fsync_dir(out.parent)


def _copy_partitioned(connection: duckdb.DuckDBPyConnection, table: Table, target: Path) -> None:
    """One file for each day and session, one of them open at a time: DuckDB's PARTITION_BY holds them all."""
    columns = ", ".join(f"t.{quoted(c)}" for c in (*table.columns, "batch"))
    order = ", ".join(f"t.{quoted(c)}" for c in table.order)
    query = (
        f"SELECT {columns}, coalesce(d.day, '1970-01-01') AS day FROM {table.name} t LEFT JOIN days d "
        f"ON d.run_id = t.run_id AND d.session_id = t.session_id ORDER BY day, t.session_id, {order}"
    )
    with ExitStack() as held:
        last, writer = None, None
        for place, rows in _stretches(connection.sql(query).to_arrow_reader(_ROWS)):
            if writer is None or place != last:
                held.close()
                last, writer = place, held.enter_context(_writer(target, place, rows.schema))
            writer.write_table(rows)


def _stretches(reader: pa.RecordBatchReader) -> Iterator[tuple[tuple[str, str], pa.Table]]:
    """Rows of one (day, session) at a time; one that a batch cuts comes in several."""
    for batch in reader:
        days, sessions = batch.column("day"), batch.column("session_id")
        rows = pa.Table.from_batches([batch]).drop_columns(["day"])
        starts = [0, *(np.flatnonzero(_changes(days) | _changes(sessions)) + 1).tolist()]
        for start, stop in zip(starts, [*starts[1:], batch.num_rows], strict=True):
            yield (days[start].as_py(), sessions[start].as_py()), rows.slice(start, stop - start)


def _changes(values: pa.Array) -> npt.NDArray[np.bool_]:
    """Whether each value but the last differs from the next."""
    found: npt.NDArray[np.bool_] = pc.not_equal(values[:-1], values[1:]).to_numpy(zero_copy_only=False)
    return found


def _writer(target: Path, place: tuple[str, str], schema: pa.Schema) -> pq.ParquetWriter:
    day, session = place
    folder = target / f"day={day}" / f"session={_folder_name(session)}"
    folder.mkdir(parents=True, exist_ok=True)
    return pq.ParquetWriter(folder / "data_0.parquet", schema, compression="zstd", use_dictionary=False)


def _folder_name(session: str) -> str:
    """The session's name URL-encoded, as Hive does. Of a longer one its begin and a hash, with a `+` between them,
    which no encoded name has; the whole name is in the rows.
    """
    name = quote(session, safe=" ")
    if len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.blake2b(session.encode(), digest_size=16).hexdigest()
    room = _LONGEST_NAME - 1 - len(digest)
    begin = session[:room]
    while len(name := quote(begin, safe=" ")) > room:  # by whole characters, which readers decode
        begin = begin[:-1]
    return f"{name}+{digest}"


def _copy(connection: duckdb.DuckDBPyConnection, query: str, target: Path) -> None:
    connection.execute(f"COPY ({query}) TO {quoted_text(target)} (FORMAT parquet, COMPRESSION zstd)")
