"""`export_log`: a log in another format, whole or not at all. The log is only read."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import duckdb

from kvtape.planner.grammar import nearest
from kvtape.traces.database import give_name, one_line
from kvtape.traces.errors import LogExists, LogWriteFailed, TraceError
from kvtape.traces.exporters.lines import log_lines
from kvtape.traces.exporters.otlp import count_spans, span_lines
from kvtape.traces.exporters.perfetto import trace_lines
from kvtape.traces.exporters.requests import PromptRequest, prompt_requests
from kvtape.traces.exporters.traces import ACCESS, bailian_lines, mooncake_lines, oracle_general
from kvtape.traces.leftovers import claimed
from kvtape.traces.merge import merge_to_parquet
from kvtape.traces.parquet_files import write_parquet
from kvtape.traces.reader import Log
from kvtape.traces.schema import quoted_text
from kvtape.traces.telling import Tell, silent
from kvtape.traces.union import UnionLog

__all__ = ["FORMATS", "ExportResult", "export_log", "format_names"]

PARQUET = "parquet"
OTLP = "otlp"
JSONL = "jsonl"

_TELL_EVERY = 1000
"""Pieces; telling costs more than writing one."""


@dataclass(frozen=True, slots=True)
class ExportResult:
    """`rows` written: rows of tables, requests, trace events or block accesses, as the format counts."""

    format: str
    rows: int


@dataclass(frozen=True, slots=True)
class _Format:
    """`pieces` of the file; how many rows a piece is."""

    summary: str
    pieces: Callable[[Log, str], Iterable[bytes]]
    rows_of: Callable[[bytes], int]


def _requests(make: Callable[[list[PromptRequest]], Iterable[bytes]]) -> Callable[[Log, str], Iterable[bytes]]:
    def pieces(log: Log, run_id: str) -> Iterable[bytes]:
        found = prompt_requests(log, run_id)
        if not found:
            raise TraceError(f"{log.path}: run {run_id} has no prompt, so there is no request to write")
        return make(found)

    return pieces


def _oracle(requests: list[PromptRequest]) -> Iterator[bytes]:
    data = oracle_general(requests)
    if not data:
        raise TraceError("no block ids are known of any prompt, so there are no accesses to write")
    yield data


FORMATS: dict[str, _Format] = {
    JSONL: _Format("every row as JSON lines; imports back to the same log", lambda log, _: log_lines(log), lambda _: 1),
    "mooncake": _Format("requests as a Mooncake trace", _requests(mooncake_lines), lambda _: 1),
    "bailian": _Format("requests as a Bailian trace", _requests(bailian_lines), lambda _: 1),
    "perfetto": _Format("a timeline for Perfetto", trace_lines, lambda _: 1),
    OTLP: _Format("OpenTelemetry spans of the GenAI conventions, as OTLP/JSON lines", span_lines, count_spans),
    "oraclegeneral": _Format(
        "block accesses for libCacheSim", _requests(_oracle), lambda data: len(data) // ACCESS.size
    ),
}
"""By name; `parquet` beside them writes a folder."""


def format_names() -> list[str]:
    return [PARQUET, *FORMATS]


def export_log(
    log: Log,
    format_name: str,
    out: str | Path,
    run_id: str | None = None,
    begin_ns: int | None = None,
    tell: Tell = silent,
) -> ExportResult:
    """Write `log` to the new file `out`: its run `run_id`, by default `default_run`.

    `jsonl` and `parquet` write all runs; `otlp` by default what was live or imported. `-` is stdout. `begin_ns`: with
    `otlp`, when the first event was, since 1970. Tells the rows that are written. Raises NoSuchRow, TraceError for what
    the format cannot say of this log, LogExists, LogWriteFailed, OSError of stdout.
    """
    if run_id is not None:
        _check_run(log, format_name, run_id)
    if begin_ns is not None and format_name != OTLP:
        raise TraceError(f"a time to begin at is for otlp; {format_name} has the log's own times")
    if format_name == PARQUET:
        with _written(out):
            return ExportResult(PARQUET, _parquet(log, Path(out), tell))
    if format_name not in FORMATS:
        hint = nearest(format_name, format_names())
        raise TraceError(f"there is no export format {format_name!r}{hint} choose one of {', '.join(format_names())}")
    chosen = FORMATS[format_name]
    total = _rows_of(log) if format_name == JSONL else 0
    if format_name == OTLP:
        pieces = span_lines(log, run_id, begin_ns)
    else:
        pieces = iter(chosen.pieces(log, log.default_run().run_id if run_id is None else run_id))
    if str(out) == "-":
        return ExportResult(format_name, _write(pieces, sys.stdout.buffer.write, chosen, tell, total))
    with _written(out):
        return ExportResult(format_name, _write_file(pieces, Path(out), chosen, tell, total))


@contextmanager
def _written(out: str | Path) -> Iterator[None]:
    """What goes wrong with a disk, told of the name that was asked for."""
    folder = Path(out).parent
    if not folder.is_dir():
        raise TraceError(f"{folder}: no such folder; create it first")
    try:
        yield
    except (OSError, duckdb.Error) as err:
        raise LogWriteFailed(f"{out}: writing failed ({one_line(err)}); nothing was exported") from err


def _check_run(log: Log, format_name: str, run_id: str) -> None:
    if format_name in (JSONL, PARQUET):
        raise TraceError(f"{format_name} holds every run of a log; leave run {run_id} away, or choose another format")
    log.sessions(run_id)  # raises NoSuchRow


def _rows_of(log: Log) -> int:
    """Lines of a log as JSON: its rows and batches and what the file is; 0 of several parts, which have none."""
    if isinstance(log, UnionLog):
        return 0
    return int(log.connection.execute("SELECT coalesce(sum(rows), 0) + count(*) + 1 FROM batches").fetchall()[0][0])


def _write_file(pieces: Iterator[bytes], target: Path, chosen: _Format, tell: Tell, total: int) -> int:
    taken = LogExists(f"{target}: already there; kvtape writes over nothing, choose another name")
    if target.exists():
        raise taken
    with claimed(target) as fresh:
        with fresh.open("xb") as handle:
            rows = _write(pieces, handle.write, chosen, tell, total)
            handle.flush()
            os.fsync(handle.fileno())
        try:
            give_name(fresh, target)
        except FileExistsError:
            raise taken from None
    return rows


def _write(pieces: Iterator[bytes], write: Callable[[bytes], object], chosen: _Format, tell: Tell, total: int) -> int:
    rows = 0
    for number, piece in enumerate(pieces):
        write(piece)
        rows += chosen.rows_of(piece)
        if number % _TELL_EVERY == 0:
            tell(rows, total, "rows")
    tell(rows, total, "rows")
    return rows


def _parquet(log: Log, out: Path, tell: Tell) -> int:
    """All rows in folders by day and session."""
    if isinstance(log, UnionLog):
        return merge_to_parquet([log.path], out, tell).rows
    # The log's own connection is confined to its file, and one process opens a file in one way only.
    connection = duckdb.connect()
    connection.execute(f"ATTACH {quoted_text(log.source)} AS log (READ_ONLY)")
    connection.execute("USE log")
    try:
        write_parquet(connection, out, tell)
        return int(connection.execute("SELECT coalesce(sum(rows), 0) FROM batches").fetchall()[0][0])
    finally:
        connection.close()
