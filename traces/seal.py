"""Sealing: the rows of a recorded log go into one new, checkpointed file, which then takes the log's name.

    1  <log>.sealing   every row, in the order of writing; triggers and views; fsync; chain verified
    2  rename          over the log: from here on the log is the sealed file
    3  sidecar         sealed: true
    4  remove          the old write-ahead log

Readers tell a sealed file by its meta row and ignore a write-ahead log that step 4 did not come to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import duckdb

from kvtape.traces.chain_check import check_chain
from kvtape.traces.database import build_file, fsync_file, name_log, open_read_only, read_meta, wal_path
from kvtape.traces.errors import LogUnreadable
from kvtape.traces.folder import register
from kvtape.traces.leftovers import sealing_path
from kvtape.traces.schema import ROW_TABLES, Table, quoted_text
from kvtape.traces.sidecar import Head, file_digest, fsync_dir, write_head
from kvtape.traces.upcast import bring_up
from kvtape.traces.writer import LogWriter

__all__ = ["check_copy", "copy_rows", "publish_sealed", "seal_log"]


def seal_log(writer: LogWriter) -> Head:
    """Seal the writer's log and close the writer. Raises OSError, duckdb.Error or LogUnreadable; until the rename
    the log is as it was.
    """
    log, head = writer.path, writer.head
    fresh = sealing_path(log)
    try:
        meta = read_meta(writer.connection, log)
        copy_rows(writer.connection, {**meta, "sealed": "true"}, fresh)
        fsync_file(fresh)
        check_copy(fresh, head)
        sealed = head.as_sealed(file_digest(fresh))
    except BaseException:
        writer.close()  # lets go of the copy first
        fresh.unlink(missing_ok=True)
        wal_path(fresh).unlink(missing_ok=True)
        raise
    writer.close()
    fresh.replace(log)
    fsync_dir(log.parent)
    write_head(log, sealed)
    register(log, sealed)
    wal_path(log).unlink(missing_ok=True)
    fsync_dir(log.parent)
    return sealed


def copy_rows(
    connection: duckdb.DuckDBPyConnection,
    meta: Mapping[str, str],
    fresh: Path,
    columns: Callable[[Table], str] = lambda _: "*",
) -> None:
    """A new file with these meta rows and every batch and row of an open log, checkpointed.

    `columns`: what of a table is copied, as SQL; everything by default.
    """
    build_file(fresh, meta)
    # A log may be called anything, also what the copy would be called here.
    name = "copy" if connection.execute("SELECT current_database()").fetchall()[0][0] != "copy" else "copy_of_it"
    connection.execute(f"ATTACH {quoted_text(fresh)} AS {name} (READ_WRITE)")
    connection.execute("BEGIN")
    connection.execute(f"INSERT INTO {name}.batches SELECT * FROM batches ORDER BY batch")
    # Rows lie in canonical order, batch after batch, as they were written, and DuckDB keeps the order of insertion.
    for table in ROW_TABLES:
        connection.execute(f"INSERT INTO {name}.{table.name} SELECT {columns(table)} FROM {table.name}")
    connection.execute("COMMIT")
    connection.execute(f"CHECKPOINT {name}")
    connection.execute(f"DETACH {name}")


def check_copy(fresh: Path, head: Head) -> None:
    """Raises LogUnreadable when the file is not what `head` says."""
    connection = open_read_only(fresh, fresh)
    try:
        meta = read_meta(connection, fresh)
        bring_up(connection, int(meta["schema_version"]))
        findings = check_chain(connection, meta, head).findings
    finally:
        connection.close()
    if findings:
        raise LogUnreadable(f"{fresh}: the sealed copy differs from the log ({findings[0].detail}); sealing given up")


def publish_sealed(fresh: Path, target: Path, head: Head) -> Head:
    """Give a finished file, made beside it, the name of the new log `target`, and that its sealed head; returns this.

    Raises LogUnreadable when the file is not what `head` says, LogExists, OSError.
    """
    fsync_file(fresh)
    check_copy(fresh, head)
    sealed = head.as_sealed(file_digest(fresh))
    name_log(fresh, target)
    fsync_dir(target.parent)
    write_head(target, sealed)
    return sealed
