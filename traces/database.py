"""Files of a log: creating the empty database, opening it for appending, and the settings that keep it safe.

A checkpoint rewrites metadata in place and is not safe against a torn write, so a log is never checkpointed while it
is recorded: rows live in the write-ahead log until the file is sealed. The empty file with its tables, triggers and
views is checkpointed once, before it gets its name.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import duckdb

from kvtape.traces.definitions import creating_statements
from kvtape.traces.errors import LogExists, LogLocked, LogTooNew, LogUnreadable, NotALog
from kvtape.traces.leftovers import claimed
from kvtape.traces.schema import ALL_TABLES, FORMAT, SCHEMA_VERSION, TABLES
from kvtape.traces.sidecar import fsync_dir

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "COPY_NAME",
    "build_file",
    "check_file_kind",
    "check_whole",
    "create_log_file",
    "damaged",
    "fsync_file",
    "give_name",
    "insert_rows",
    "name_log",
    "one_line",
    "open_for_append",
    "open_read_only",
    "read_meta",
    "readable",
    "refuse_leftovers",
    "wal_path",
]

COPY_NAME: Final = "snapshot.duckdb"
"""Name of the copy through which a log is read that is not to be touched; nobody need know where it is."""

_MAGIC = b"DUCK"
_MAGIC_AT = 8
_HEADER_BYTES = 3 * 4096
_READ_ONLY: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "lock_configuration": "true",
}


def wal_path(log: Path) -> Path:
    return log.with_name(log.name + ".wal")


_COPY = re.compile(rf'(?:file )?"[^"]*/{re.escape(COPY_NAME)}(?:\.wal)?"')


def one_line(error: BaseException) -> str:
    """The first line of an engine's message, without the places of copies that are made to read a log."""
    text = str(error).strip() or type(error).__name__
    return _COPY.sub("a copy of it", text.splitlines()[0])


def damaged(shown: Path, error: duckdb.Error) -> LogUnreadable:
    """What DuckDB said over a file that it cannot read, as an error that says what to do."""
    return LogUnreadable(
        f"{shown}: torn or damaged ({one_line(error)}); kvtape repair LOG --out NEW keeps what is whole of it"
    )


def create_log_file(log: Path, meta: Mapping[str, str]) -> None:
    """Make the empty log appear under its name, whole. Raises LogExists when the name is taken."""
    refuse_leftovers(log)
    with claimed(log) as fresh:
        build_file(fresh, meta)
        fsync_file(fresh)
        name_log(fresh, log)
    fsync_dir(log.parent)


def name_log(fresh: Path, log: Path) -> None:
    """`give_name` for a log. Raises LogExists."""
    try:
        give_name(fresh, log)
    except FileExistsError:
        raise LogExists(_exists(log)) from None


def give_name(fresh: Path, path: Path) -> None:
    """Name the file without writing over another one; a plain rename would. Raises FileExistsError."""
    try:
        os.link(fresh, path)
    except OSError as err:
        if err.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        # A file system without hard links: there, two recorders that start at the same moment are not kept apart.
        if path.exists():
            raise FileExistsError(path) from None
        fresh.rename(path)


def refuse_leftovers(log: Path) -> None:
    """Raise LogExists when the log, or the rows of a log whose file is gone, would be written over."""
    if log.exists():
        raise LogExists(_exists(log))
    if wal_path(log).exists():
        raise LogExists(f"{wal_path(log)}: rows of a log whose file is gone; move it away before you record here")


def _exists(log: Path) -> str:
    return f"{log}: already there; kvtape never writes over a log: choose another path or remove it yourself"


def build_file(path: Path, meta: Mapping[str, str]) -> None:
    """A database with every table, trigger and view, and these meta rows; checkpointed and closed."""
    for stale in (path, wal_path(path)):
        stale.unlink(missing_ok=True)
    connection = duckdb.connect(str(path))
    try:
        connection.execute("BEGIN")
        for statement in creating_statements():
            connection.execute(statement)
        for key, value in meta.items():
            connection.execute("INSERT INTO meta VALUES (?, ?)", [key, value])
        connection.execute("COMMIT")
        connection.execute("CHECKPOINT")
    finally:
        connection.close()


def open_for_append(log: Path) -> duckdb.DuckDBPyConnection:
    """A read-write connection that never checkpoints. Raises LogUnreadable, or LogExists when another has it."""
    try:
        # One thread: batches are small, and the cores belong to the engine that is being recorded.
        connection = duckdb.connect(str(log), config={"checkpoint_threshold": "1TB", "threads": "1"})
    except duckdb.Error as err:
        if isinstance(err, duckdb.IOException) and "lock" in str(err):
            raise LogExists(f"{log}: another process is recording into it; choose another path") from None
        raise LogUnreadable(
            f"{log}: cannot be opened ({one_line(err)}); see whether the folder can be written and has space"
        ) from None
    connection.execute("PRAGMA disable_checkpoint_on_shutdown")
    return connection


def insert_rows(connection: duckdb.DuckDBPyConnection, table: str, incoming: pa.Table) -> None:
    """Append rows in the columns of `table`, `batch` too."""
    # DuckDB finds the argument by its name. A view registered on it would be made and dropped each time, and the
    # transaction would hold on to the rows until its end.
    connection.execute(f"INSERT INTO {table} FROM incoming")


def check_file_kind(path: Path, shown: Path) -> None:
    """Raise NotALog when the file does not begin as a DuckDB file does."""
    with path.open("rb") as handle:
        head = handle.read(_MAGIC_AT + len(_MAGIC))
    if head[_MAGIC_AT:] != _MAGIC:
        raise NotALog(f"{shown}: not a kvtape log (not even a DuckDB file); a trace is made one by kvtape import")


@contextmanager
def readable(shown: Path) -> Iterator[None]:
    """Turn what DuckDB raises over damaged blocks into LogUnreadable."""
    try:
        yield
    except duckdb.Error as err:
        raise damaged(shown, err) from None


def read_meta(connection: duckdb.DuckDBPyConnection, shown: Path, *, alone: bool = False) -> dict[str, str]:
    """The meta rows of a log this version can read (`alone`: tables are elsewhere).

    Raises NotALog, LogTooNew, LogUnreadable.
    """
    with readable(shown):
        try:
            rows = connection.execute("SELECT key, value FROM meta").fetchall()
        except (duckdb.CatalogException, duckdb.BinderException):
            rows = []
    meta = {str(k): str(v) for k, v in rows}
    if meta.get("format") != FORMAT or not meta.get("schema_version", "").isdigit():
        raise NotALog(f"{shown}: a DuckDB file, but not a kvtape log; give one that kvtape record or import wrote")
    version = int(meta["schema_version"])
    if version > SCHEMA_VERSION:
        raise LogTooNew(
            f"{shown}: schema version {version} (kvtape {meta.get('kvtape_version', '?')}); this kvtape reads up to "
            f"{SCHEMA_VERSION}: upgrade kvtape"
        )
    if not alone:
        _check_tables(connection, shown, version)
    return meta


def _check_tables(connection: duckdb.DuckDBPyConnection, shown: Path, version: int) -> None:
    with readable(shown):
        there = {name for (name,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
    of_then = [name for name in ALL_TABLES if name not in TABLES or TABLES[name].since <= version]
    lacking = [name for name in of_then if name not in there]
    if lacking:
        raise NotALog(
            f"{shown}: a log without the tables {', '.join(lacking)}, written before kvtape 0.1.0 or changed since; "
            f"record it anew"
        )


def check_whole(connection: duckdb.DuckDBPyConnection, path: Path, shown: Path) -> None:
    """Raise LogUnreadable when the file is shorter than its header says: DuckDB notices only at the missing block."""
    with readable(shown):
        block_bytes, blocks = connection.execute(
            "SELECT block_size, total_blocks FROM pragma_database_size()"
        ).fetchall()[0]
    wanted, found = _HEADER_BYTES + block_bytes * blocks, path.stat().st_size
    if found < wanted:
        raise LogUnreadable(
            f"{shown}: cut off, {found} of {wanted} bytes are there; copy it again from where it is whole"
        )


def fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_read_only(path: Path, shown: Path, *, confined: bool = True) -> duckdb.DuckDBPyConnection:
    """A connection that cannot write the file nor, `confined`, reach any other. Raises LogUnreadable, LogLocked."""
    try:
        return duckdb.connect(str(path), read_only=True, config=_READ_ONLY if confined else {})
    except duckdb.Error as err:  # a damaged write-ahead log raises the bare base class
        if isinstance(err, duckdb.IOException) and "lock" in str(err):
            raise LogLocked(
                f"{shown}: another process is recording into it; read it meanwhile, or wait until it is sealed"
            ) from None
        raise damaged(shown, err) from None
