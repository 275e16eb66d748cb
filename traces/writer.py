"""Appending batches to a log: one call, one transaction, one acknowledgement.

`LogWriter` is the columnar path: it takes Arrow tables, numbers and hashes the batches, commits them, and writes the
sidecar. It does not check sequence numbers; `Recorder` does that before events come here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path

import duckdb
import pyarrow as pa

from kvtape.planner.rows import RunRow
from kvtape.traces.canonical import table_digest
from kvtape.traces.chain import genesis
from kvtape.traces.codec import to_arrow
from kvtape.traces.database import create_log_file, insert_rows, open_for_append, read_meta, refuse_leftovers, wal_path
from kvtape.traces.definitions import definitions_digest
from kvtape.traces.errors import KeyMismatch, LogExists, LogMissing, LogUnreadable, LogWriteFailed
from kvtape.traces.folder import register
from kvtape.traces.group import group_batches
from kvtape.traces.keys import key_id, key_path, load_or_create_key
from kvtape.traces.live import recorded_here, recording
from kvtape.traces.reader import open_log
from kvtape.traces.schema import FORMAT, RUNS, SCHEMA_VERSION
from kvtape.traces.sidecar import Head, file_digest, head_path, read_head, session_key, write_head

__all__ = ["LogWriter", "new_meta"]


class LogWriter:
    """The one writer of a log file. Not thread-safe: one thread appends."""

    def __init__(self, path: Path, connection: duckdb.DuckDBPyConnection, head: Head, key: bytes, held: ExitStack):
        self.path = path
        self.key = key
        self.head = head
        self.connection = connection
        self._held = held
        self._usable = True

    @classmethod
    def create(cls, path: Path, run: RunRow, key: bytes | None = None) -> LogWriter:
        """A new log; its key is drawn and kept beside it unless one is given. Raises LogExists."""
        if recorded_here(path):
            raise LogExists(f"{path}: this process is already recording into it; close that recorder first")
        refuse_leftovers(path)  # before a key is drawn: a log that is there has its own
        key = load_or_create_key(path) if key is None else key
        meta = new_meta(run, key)
        create_log_file(path, meta)
        head = Head(meta["log_id"], 0, genesis(meta).hex(), 0, {}, file_digest(path))
        register(path, head)
        return cls._hold(path, key, lambda _: head)

    @classmethod
    def resume(cls, path: Path, key: bytes | None = None) -> LogWriter:
        """Go on with a log that was not sealed, after the last committed batch.

        Raises LogMissing, LogExists (sealed, or being recorded), KeyMismatch, LogUnreadable (torn, or the sidecar says
        that it is not what was acknowledged, or is gone).
        """
        if not path.exists():
            raise LogMissing(f"{path}: no such log; give the path of one that was left unsealed")
        if recorded_here(path):
            raise LogExists(f"{path}: this process is already recording into it; close that recorder first")
        _refuse_sealed(path)
        if key is None:
            if not key_path(path).exists():
                raise KeyMismatch(f"{key_path(path)}: the key is missing; put it back to go on recording")
            key = load_or_create_key(path)
        rewritten = not wal_path(path).exists()  # by another client that had opened it to write
        return cls._hold(path, key, lambda connection: _resumed_head(path, connection, key, rewritten=rewritten))

    @classmethod
    def _hold(cls, path: Path, key: bytes, find_head: Callable[[duckdb.DuckDBPyConnection], Head]) -> LogWriter:
        with ExitStack() as held:
            held.enter_context(recording(path))
            connection = open_for_append(path)
            held.callback(_close, connection)
            head = find_head(connection)
            write_head(path, head)
            return cls(path, connection, head, key, held.pop_all())
        raise AssertionError("unreachable")

    def append(self, tables: Mapping[str, pa.Table]) -> Head:
        """Commit the rows (tables by name, columns as in `schema.arrow_schema`) as one batch: `append_group` of one."""
        return self.append_group([tables])

    def append_group(self, batches: Sequence[Mapping[str, pa.Table]]) -> Head:
        """Commit the batches in one transaction, under one head; durable on return, all of them or none.

        Raises duckdb.Error or OSError; the batches are then not acknowledged, and the writer takes no other
        (LogWriteFailed): the file may be ahead of its head.
        """
        if not self._usable:
            raise LogWriteFailed(f"{self.path}: an earlier write failed; close it and go on with resume")
        if not batches:
            return self.head
        self._usable = False
        group = group_batches(self.head, batches)
        self.connection.execute("BEGIN")
        try:
            for name, rows in group.tables.items():
                self._insert(name, rows)
            marks = ", ".join(["(?, ?, ?, ?, ?, ?)"] * len(group.links))
            self.connection.execute(f"INSERT INTO batches VALUES {marks}", list(chain.from_iterable(group.links)))
            self.connection.execute("COMMIT")
        except BaseException:
            with suppress(duckdb.Error):  # the engine has often rolled back by itself
                self.connection.execute("ROLLBACK")
            raise
        write_head(self.path, group.head)
        self.head = group.head
        self._usable = True
        return self.head

    def _insert(self, name: str, rows: pa.Table) -> None:
        insert_rows(self.connection, name, rows)

    def close(self) -> None:
        """Give the file free. Idempotent; what was appended is already durable."""
        self._held.close()


def _close(connection: duckdb.DuckDBPyConnection) -> None:
    with suppress(duckdb.Error):  # after a failed write the engine refuses everything
        connection.close()


def new_meta(run: RunRow, key: bytes) -> dict[str, str]:
    """The meta rows of a log that begins with `run`."""
    return {
        "format": FORMAT,
        "schema_version": str(SCHEMA_VERSION),
        "kvtape_version": run.kvtape_version,
        "definitions": definitions_digest(),
        "log_id": _log_id(run, key),
        "key_id": key_id(key),
    }


def _log_id(run: RunRow, key: bytes) -> str:
    first = table_digest(RUNS.fields, to_arrow(RUNS, [run]))
    return hashlib.blake2b(b"kvtape log id" + first, digest_size=8, key=key).hexdigest()


def _refuse_sealed(path: Path) -> None:
    """By the file itself: a crash while sealing leaves a sealed file beside a sidecar that does not say so yet."""
    with open_log(path, torn=True) as log:
        if log.sealed:
            raise LogExists(f"{path}: sealed; a sealed log is finished, record into another path")


def _resumed_head(path: Path, connection: duckdb.DuckDBPyConnection, key: bytes, *, rewritten: bool) -> Head:
    """The head as the file has it; it may be ahead of the sidecar, never behind.

    The sidecar is about to be written anew, so whatever it alone can tell must be told here.
    """
    meta = read_meta(connection, path)
    if meta["schema_version"] != str(SCHEMA_VERSION):
        raise LogExists(f"{path}: begun by an older kvtape; `kvtape repair` ends it, record into another path")
    if meta.get("key_id") != key_id(key):
        raise KeyMismatch(f"{path}: written under another key; put its own key file back")
    last = connection.execute(
        "SELECT batch, digest, (SELECT sum(rows)::UBIGINT FROM batches) FROM batches ORDER BY batch DESC LIMIT 1"
    ).fetchall()
    batch, digest, rows = last[0] if last else (0, genesis(meta), 0)
    marks = connection.execute("SELECT run_id, session_id, max(seq) FROM events GROUP BY ALL ORDER BY ALL").fetchall()
    file = _check_sidecar(path, connection, meta, batch)
    sessions = {session_key(run, session): seq for run, session, seq in marks}
    return Head(meta["log_id"], batch, digest.hex(), rows, sessions, file_digest(path) if rewritten else file)


def _check_sidecar(path: Path, connection: duckdb.DuckDBPyConnection, meta: Mapping[str, str], last_batch: int) -> str:
    """The file's digest, which the sidecar bears.

    Raises LogUnreadable when the sidecar contradicts the file, or is not there to contradict it.
    """
    try:
        head = read_head(path)
    except ValueError as err:
        raise LogUnreadable(f"{path}: {err}; put it back to go on recording") from None
    if head is None:
        if last_batch:
            raise LogUnreadable(f"{path}: {head_path(path).name} is missing; put it back to go on recording")
        return file_digest(path)  # the recorder died before its first batch
    if head.log_id != meta.get("log_id") or head.batch > last_batch:
        raise LogUnreadable(
            f"{path}: its acknowledged tail is gone or the sidecar is another log's (head at batch {head.batch}, "
            f"file at {last_batch}); see `kvtape verify`"
        )
    found = connection.execute("SELECT digest FROM batches WHERE batch = ?", [head.batch]).fetchall()
    if (found[0][0] if found else genesis(meta)).hex() != head.digest:
        raise LogUnreadable(f"{path}: batch {head.batch} is not the one that was acknowledged; see `kvtape verify`")
    return head.file
