"""A new log from rows: written under another name, sealed, and only then given its own. A failure leaves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import duckdb
import pyarrow as pa

from kvtape.planner.events import SCHEMA_VERSION
from kvtape.planner.rows import RunRow
from kvtape.traces.codec import to_arrow
from kvtape.traces.database import give_name, one_line, refuse_leftovers
from kvtape.traces.errors import LogExists, LogWriteFailed
from kvtape.traces.importers.columns import Columns
from kvtape.traces.keys import load_or_create_key
from kvtape.traces.leftovers import claimed
from kvtape.traces.schema import RUNS, TABLES
from kvtape.traces.seal import seal_log
from kvtape.traces.sidecar import fsync_dir, head_path
from kvtape.traces.writer import LogWriter

__all__ = ["Batch", "arrow_rows", "new_log", "write_new_log"]

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


def arrow_rows(name: str, run_id: str, rows: Columns) -> pa.Table:
    """Rows of one run as the Arrow table of table `name`."""
    return rows.to_arrow(TABLES[name], {"run_id": run_id, "schema_version": SCHEMA_VERSION})
