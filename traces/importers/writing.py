"""A new log from rows: written under another name, sealed, and only then given its own. A failure leaves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path

import duckdb
import pyarrow as pa

from kvtape.planner.events import SCHEMA_VERSION
from kvtape.planner.rows import RunRow
from kvtape.traces.chain import genesis
from kvtape.traces.codec import to_arrow
from kvtape.traces.database import build_file, fsync_file, give_name, insert_rows, one_line, refuse_leftovers
from kvtape.traces.errors import LogExists, LogWriteFailed
from kvtape.traces.folder import register
from kvtape.traces.group import Group, group_batches
from kvtape.traces.importers.events import EventMaker
from kvtape.traces.importers.protocol import Record
from kvtape.traces.keys import load_or_create_key
from kvtape.traces.leftovers import claimed
from kvtape.traces.schema import RUNS, TABLES
from kvtape.traces.seal import check_copy
from kvtape.traces.sidecar import Head, file_digest, fsync_dir, head_path, read_head, write_head
from kvtape.traces.writer import new_meta

__all__ = ["Batch", "new_log", "record_batches", "taken_rows", "write_new_log"]

Batch = Mapping[str, pa.Table]
"""Rows of one batch, by table."""

_BATCH_EVENTS = 122_880
"""A row group of DuckDB."""

_INGESTING: dict[str, str | bool | int | float | list[str]] = {"threads": "1", "write_buffer_row_group_count": "1"}
"""Row groups go to the file one by one; DuckDB would hold five of every table."""


@contextmanager
def new_log(log: Path) -> Iterator[Path]:
    """A name for a log in the making; when the block ends well, file and head get the names of `log`.

    Raises LogExists. After any error there is neither `log` nor anything beside it.
    """
    refuse_leftovers(log)
    with claimed(log) as fresh:
        yield fresh
        _name(fresh, log)
    fsync_dir(log.parent)
    head = read_head(log)
    if head is not None:
        register(log, head)  # in a log folder it is a segment


def write_new_log(log: Path, run: RunRow, batches: Callable[[bytes], Iterator[Batch]]) -> None:
    """Write `batches(key)` as a sealed log. Raises LogExists, LogWriteFailed; `log` then does not exist."""
    try:
        with new_log(log) as fresh:
            _fill(fresh, run, load_or_create_key(log), batches)
    except (OSError, duckdb.Error) as err:
        raise LogWriteFailed(f"{log}: writing failed ({one_line(err)}); nothing was imported") from err


def _fill(fresh: Path, run: RunRow, key: bytes, batches: Callable[[bytes], Iterator[Batch]]) -> None:
    """Rows go straight into the sealed file: as nothing is acknowledged before it has its name, it needs no
    write-ahead log of rows, nor a head before the last.
    """
    meta = new_meta(run, key)
    head = Head(meta["log_id"], 0, genesis(meta).hex(), 0, {}, "")
    build_file(fresh, {**meta, "sealed": "true"})
    with closing(duckdb.connect(str(fresh), config=_INGESTING)) as connection:
        connection.execute("BEGIN")
        for batch in chain([{RUNS.name: to_arrow(RUNS, [run])}], batches(key)):
            head = _append(connection, group_batches(head, [batch]))
        connection.execute("COMMIT")
        connection.execute("CHECKPOINT")
    fsync_file(fresh)
    check_copy(fresh, head)
    write_head(fresh, head.as_sealed(file_digest(fresh)))


def _append(connection: duckdb.DuckDBPyConnection, group: Group) -> Head:
    for name, rows in group.tables.items():
        insert_rows(connection, name, rows)
    connection.executemany("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?)", list(group.links))
    return group.head


def _name(fresh: Path, log: Path) -> None:
    """The head first: a log never stands without it."""
    try:
        give_name(head_path(fresh), head_path(log))
    except FileExistsError:
        raise LogExists(f"{head_path(log)}: the head of a log that is gone; move it away to import here") from None
    try:
        give_name(fresh, log)
    except BaseException as err:
        if not _is_named(fresh, log):  # else a Ctrl-C came just behind it
            with suppress(OSError):
                head_path(log).unlink()
        if isinstance(err, FileExistsError):
            raise LogExists(f"{log}: already there; kvtape never writes over a log: choose another path") from None
        raise


def _is_named(fresh: Path, log: Path) -> bool:
    return log.exists() and (not fresh.exists() or fresh.samefile(log))


def record_batches(records: Iterable[tuple[Record, str]], maker: EventMaker) -> Iterator[Batch]:
    """What `maker` makes of records, each with the id of its session, and of the sessions' ends; no batch is empty."""
    for record, session_id in records:
        maker.add(record, session_id)
        if len(maker.events) >= _BATCH_EVENTS:
            yield taken_rows(maker)
    for _ in maker.closing():
        if len(maker.events) >= _BATCH_EVENTS:
            yield taken_rows(maker)
    if len(maker.events):
        yield taken_rows(maker)


def taken_rows(maker: EventMaker) -> Batch:
    """The rows that `maker` collected, by table; none of them is empty."""
    always = {"run_id": maker.run_id, "schema_version": SCHEMA_VERSION}
    return {name: rows.to_arrow(TABLES[name], always) for name, rows in maker.take().items() if rows}
