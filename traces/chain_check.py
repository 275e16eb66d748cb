"""Recompute the chain of a log and say where it breaks.

Each batch is judged on its own: its rows against the digests its batch row recorded, the batch row against its own
digest, and that against the batch before and the sidecar. One edited row is therefore one finding, not one for every
batch after it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import duckdb
import numpy as np
import pyarrow as pa

from kvtape.traces.canonical import is_in_canonical_order
from kvtape.traces.chain import BatchSummary, genesis, link, recorded_spans
from kvtape.traces.findings import Finding, FindingKind
from kvtape.traces.query import empty_columns, select_arrow
from kvtape.traces.row_check import are_recorded, check_rows
from kvtape.traces.schema import ROW_TABLES, Table
from kvtape.traces.sidecar import Head, session_key
from kvtape.traces.stretches import Stretches
from kvtape.traces.telling import Tell, silent

__all__ = ["ChainReport", "StoredBatch", "batch_slices", "chain_windows", "check_chain", "last_seqs", "stored_batches"]

_WINDOW_ROWS = 300_000

Bounds = list[tuple[int, int]]
"""Where the rows of each batch of a window begin and end."""


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """One row of `batches`."""

    batch: int
    summary: BatchSummary
    previous: bytes
    digest: bytes


@dataclass(slots=True)
class ChainReport:
    """`rows` of all tables, number of `batches`, `digest` (hex) of the last one, and what is wrong."""

    rows: int = 0
    batches: int = 0
    digest: str = ""
    findings: list[Finding] = field(default_factory=list)


def stored_batches(connection: duckdb.DuckDBPyConnection) -> list[StoredBatch]:
    found = connection.execute(
        "SELECT batch, rows, spans, tables, previous, digest FROM batches ORDER BY batch"
    ).fetchall()
    return [StoredBatch(b, BatchSummary(rows, spans, tables), p, d) for b, rows, spans, tables, p, d in found]


def check_chain(
    connection: duckdb.DuckDBPyConnection, meta: dict[str, str], head: Head | None, tell: Tell = silent
) -> ChainReport:
    """Recompute everything; `head` None is not a finding here. Reads a window of batches at a time; tells rows."""
    report = ChainReport(digest=genesis(meta).hex())
    batches = stored_batches(connection)
    report.batches = len(batches)
    report.findings += _check_links(meta, batches)
    total = sum(stored.summary.rows for stored in batches)
    for table, window, rows, bounds in _read_ahead(connection, batches):
        report.rows += _check_window(table, window, rows, bounds, report.findings)
        tell(report.rows, total, "rows")
    report.findings += _strays(connection)
    report.findings += _gaps(connection)
    if batches:
        report.digest = batches[-1].digest.hex()
    if head is not None:
        report.findings += _check_head(meta, batches, head)
    report.findings.sort(key=lambda f: (f.batch is None, f.batch or 0))
    return report


def _read_ahead(
    connection: duckdb.DuckDBPyConnection, batches: list[StoredBatch]
) -> Iterator[tuple[Table, list[StoredBatch], pa.Table, Bounds]]:
    """Each table of each window with its rows; the next ones are read while these are hashed."""
    empty = {table.name: empty_columns(connection, table) for table in ROW_TABLES}
    wanted = ((table, window) for window in chain_windows(batches) for table in ROW_TABLES)
    with ThreadPoolExecutor(1) as reader:  # the only one that uses the connection until all is read
        reading: deque[tuple[Table, list[StoredBatch], Future[tuple[pa.Table, Bounds]]]] = deque()
        for table, window in wanted:
            reading.append((table, window, reader.submit(_window_rows, connection, table, window, empty[table.name])))
            if len(reading) > 1:
                before, its, rows = reading.popleft()
                yield before, its, *rows.result()
        for before, its, rows in reading:
            yield before, its, *rows.result()


def _check_window(
    table: Table, window: list[StoredBatch], rows: pa.Table, bounds: Bounds, findings: list[Finding]
) -> int:
    """Compare the rows of a table in these batches with what was recorded of them; how many rows there are."""
    stretches = Stretches(table.chained, rows)
    for stored, (start, stop) in zip(window, bounds, strict=True):
        if not are_recorded(table, stored.summary, stop - start, functools.partial(stretches.digest, start, stop)):
            findings += check_rows(table, stored.batch, stored.summary, rows.slice(start, stop - start))
    return int(sum(stop - start for start, stop in bounds))


def chain_windows(batches: list[StoredBatch]) -> Iterator[list[StoredBatch]]:
    """The batches in groups that are read at once."""
    window: list[StoredBatch] = []
    rows = 0
    for stored in batches:
        window.append(stored)
        rows += stored.summary.rows
        if rows >= _WINDOW_ROWS:
            yield window
            window, rows = [], 0
    if window:
        yield window


def batch_slices(
    connection: duckdb.DuckDBPyConnection, table: Table, window: list[StoredBatch]
) -> Iterator[tuple[StoredBatch, pa.Table]]:
    """Each batch of `window` with its rows of `table` in canonical order."""
    rows, bounds = _window_rows(connection, table, window)
    for stored, (start, stop) in zip(window, bounds, strict=True):
        yield stored, rows.slice(start, stop - start)


def _window_rows(
    connection: duckdb.DuckDBPyConnection, table: Table, window: list[StoredBatch], empty: Collection[str] = ()
) -> tuple[pa.Table, Bounds]:
    """Rows of batch after batch, each batch in canonical order, and where each begins and ends."""
    between = "batch BETWEEN ? AND ?", [window[0].batch, window[-1].batch]
    # Rows lie in this order as they were written; looking is far cheaper than sorting.
    rows = select_arrow(connection, table, *between, ordered=False, empty=empty)
    if not is_in_canonical_order(table, rows, "batch"):
        rows = select_arrow(connection, table, *between, by_batch=True, empty=empty)
    numbers = rows.column("batch").to_numpy()
    wanted = np.array([s.batch for s in window], np.uint64)
    starts, stops = (np.searchsorted(numbers, wanted, side).tolist() for side in ("left", "right"))
    return rows, list(zip(starts, stops, strict=True))


def _check_links(meta: dict[str, str], batches: list[StoredBatch]) -> Iterator[Finding]:
    before, expected = genesis(meta), 1
    for stored in batches:
        if stored.batch > expected:
            gone = f"batch {expected}" if stored.batch == expected + 1 else f"batches {expected} to {stored.batch - 1}"
            yield Finding(FindingKind.BATCH_MISSING, f"{gone} gone from the chain", expected, "batches")
        elif stored.batch < expected:
            yield Finding(FindingKind.CHAIN, f"batch {stored.batch} is there twice", stored.batch, "batches")
        elif stored.previous != before:
            what = "the meta rows were changed" if stored.batch == 1 else "it does not follow the batch before it"
            yield Finding(FindingKind.CHAIN, f"batch {stored.batch}: {what}", stored.batch, "batches")
        if link(stored.previous, stored.batch, stored.summary) != stored.digest:
            yield Finding(
                FindingKind.CHAIN, f"batch {stored.batch}: its row does not have its digest", stored.batch, "batches"
            )
        before, expected = stored.digest, stored.batch + 1


def _strays(connection: duckdb.DuckDBPyConnection) -> Iterator[Finding]:
    for table in ROW_TABLES:
        found = connection.execute(
            f"SELECT batch, count(*) FROM {table.name} ANTI JOIN batches USING (batch) GROUP BY batch ORDER BY batch"
        ).fetchall()
        for batch, n in found:
            yield Finding(
                FindingKind.STRAY,
                f"{n} rows of {table.name} in batch {batch}, which is not in the chain",
                batch,
                table.name,
            )


_GAPS = """
    WITH suspects AS (
        SELECT run_id, session_id FROM events GROUP BY run_id, session_id
        HAVING min(seq) > 0 OR max(seq)::HUGEINT + 1 <> count(*) OR bool_or(op = 'lost')
            OR sum(seq) <> count(*)::HUGEINT * (count(*) - 1) // 2),
    steps AS (
        SELECT run_id, session_id, seq, batch, lag(seq + step) OVER (PARTITION BY run_id, session_id ORDER BY seq)
            AS expected
        FROM (SELECT *, CASE WHEN op = 'lost' AND json_valid(detail)
                             THEN greatest(1, coalesce(TRY_CAST(detail->>'events' AS UBIGINT), 1)) ELSE 1 END AS step
              FROM events SEMI JOIN suspects USING (run_id, session_id)))
    SELECT run_id, session_id, coalesce(expected, 0), seq, batch FROM steps WHERE seq > coalesce(expected, 0)
    ORDER BY ALL LIMIT 100
"""


def _gaps(connection: duckdb.DuckDBPyConnection) -> Iterator[Finding]:
    for run, session, expected, seq, batch in connection.execute(_GAPS).fetchall():
        detail = f"run {run} session {session}: seq {expected} to {seq - 1} are not there, {seq} follows"
        yield Finding(FindingKind.GAP, detail, batch, "events")


def _check_head(meta: dict[str, str], batches: list[StoredBatch], head: Head) -> Iterator[Finding]:
    if head.log_id != meta.get("log_id"):
        yield Finding(
            FindingKind.HEAD_FOREIGN, f"the sidecar belongs to log {head.log_id}, this is {meta.get('log_id')}"
        )
        return
    last = batches[-1].batch if batches else 0
    if head.batch > last:
        yield Finding(
            FindingKind.LOST_TAIL,
            f"acknowledged up to batch {head.batch}, the file ends with batch {last}: "
            f"batches {last + 1} to {head.batch} are lost",
            last + 1,
        )
        return
    covered = [s for s in batches if s.batch <= head.batch]
    digest = covered[-1].digest if covered else genesis(meta)
    if digest.hex() != head.digest:
        yield Finding(
            FindingKind.HEAD_MISMATCH,
            f"batch {head.batch} has another digest than was acknowledged: the chain was rewritten",
            head.batch,
        )
    elif (sum(s.summary.rows for s in covered), last_seqs(covered)) != (head.rows, head.sessions):
        yield Finding(
            FindingKind.HEAD_MISMATCH, "the sidecar's counts are not those of the batches it covers", head.batch
        )


def last_seqs(batches: list[StoredBatch]) -> dict[str, int]:
    """Last seq of each "run/session" as the batches' spans have it."""
    last: dict[str, int] = {}
    for stored in batches:
        for run, session, _, seq in recorded_spans(stored.summary):
            key = session_key(run, session)
            last[key] = max(last.get(key, 0), seq)
    return last
