"""A new log from rows: written under another name, sealed, and only then given its own. A failure leaves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from kvtape.planner.events import SCHEMA_VERSION
from kvtape.planner.rows import RunRow
from kvtape.traces.codec import to_arrow
from kvtape.traces.database import give_name, one_line, refuse_leftovers
from kvtape.traces.errors import LogExists, LogWriteFailed
from kvtape.traces.importers.events import Row
from kvtape.traces.keys import load_or_create_key
from kvtape.traces.leftovers import claimed
from kvtape.traces.schema import RUNS, TABLES, Table, arrow_schema
from kvtape.traces.seal import seal_log
from kvtape.traces.sidecar import fsync_dir, head_path
from kvtape.traces.writer import LogWriter

__all__ = ["Batch", "arrow_rows", "arrow_table", "new_log", "write_new_log"]

Batch = Mapping[str, pa.Table]
"""Rows of one transaction, by table."""


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


def write_new_log(log: Path, run: RunRow, batches: Callable[[bytes], Iterator[Batch]]) -> None:
    """Write `batches(key)` as a sealed log. Raises LogExists, LogWriteFailed; `log` then does not exist."""
    try:
        with new_log(log) as fresh:
            _fill(fresh, run, load_or_create_key(log), batches)
    except (OSError, duckdb.Error) as err:
        raise LogWriteFailed(f"{log}: writing failed ({one_line(err)}); nothing was imported") from err


def _fill(fresh: Path, run: RunRow, key: bytes, batches: Callable[[bytes], Iterator[Batch]]) -> None:
    writer = LogWriter.create(fresh, run, key)
    try:
        writer.append({RUNS.name: to_arrow(RUNS, [run])})
        for batch in batches(key):
            writer.append(batch)
        seal_log(writer)
    finally:
        writer.close()


def _name(fresh: Path, log: Path) -> None:
    """The head first: a log never stands without it."""
    try:
        give_name(head_path(fresh), head_path(log))
    except FileExistsError:
        raise LogExists(f"{head_path(log)}: the head of a log that is gone; move it away to import here") from None
    try:
        give_name(fresh, log)
    except FileExistsError:
        with suppress(OSError):
            head_path(log).unlink()
        raise LogExists(f"{log}: already there; kvtape never writes over a log: choose another path") from None


def arrow_rows(name: str, run_id: str, rows: Sequence[Row]) -> pa.Table:
    """Rows of one run as the Arrow table of table `name`."""
    return arrow_table(TABLES[name], rows, {"run_id": run_id, "schema_version": SCHEMA_VERSION})


def arrow_table(table: Table, rows: Sequence[Row], constants: Mapping[str, Any] | None = None) -> pa.Table:
    """Rows in the columns of `table`; a column that no row has is null. `constants` are the same in every row.

    Raises OverflowError, TypeError or pyarrow.ArrowInvalid for a value that its column cannot hold.
    """
    known = constants or {}
    used = set().union(*(row.keys() for row in rows))
    arrays = []
    for column in arrow_schema(table):
        if column.name in known:
            arrays.append(pa.repeat(pa.scalar(known[column.name], column.type), len(rows)))
        elif column.name in used:
            arrays.append(pa.array([row.get(column.name) for row in rows], column.type))
        else:
            arrays.append(pa.nulls(len(rows), column.type))
    return pa.Table.from_arrays(arrays, schema=arrow_schema(table))
