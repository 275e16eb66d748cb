"""Merging: the batches of several logs, one after the other, in one new sealed log with a chain of its own.

Rows stay as they are, so that what an event says about its session, and every keyed hash, stays true. A run that was
recorded by several processes has its row once.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa

from kvtape.traces.chain import genesis, link, summarise
from kvtape.traces.chain_check import StoredBatch, batch_slices, chain_windows, last_seqs, stored_batches
from kvtape.traces.database import build_file, open_read_only, refuse_leftovers
from kvtape.traces.definitions import definitions_digest
from kvtape.traces.errors import KeyMismatch, LogExists, LogUnreadable
from kvtape.traces.folder import is_log_folder, segments
from kvtape.traces.group import insert_batch
from kvtape.traces.leftovers import claimed
from kvtape.traces.parquet_files import write_parquet
from kvtape.traces.reader import Log, open_log
from kvtape.traces.schema import ROW_TABLES, RUNS, SCHEMA_VERSION, Table
from kvtape.traces.seal import publish_sealed
from kvtape.traces.sidecar import Head
from kvtape.traces.telling import Tell, silent, tell_of
from kvtape.traces.union import Part, union
from kvtape.traces.verify import verify

__all__ = ["MergeReport", "merge", "merge_to_parquet", "parts_of"]


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What stands in the new log; `digest` is its chain's, `sources` the file name and chain digest of each part."""

    events: int
    sessions: int
    batches: int
    rows: int
    digest: str
    sources: tuple[tuple[str, str], ...]


def parts_of(paths: Sequence[Path]) -> list[Path]:
    """The log files behind files and log folders; a segment that is gone is left out, as `verify` says."""
    found: list[Path] = []
    for path in paths:
        found += [s.path for s in segments(path) if s.there] if is_log_folder(path) else [path]
    return found


def merge(paths: Sequence[str | Path], out: str | Path, tell: Tell = silent) -> MergeReport:
    """Make the sealed log `out` of logs and log folders, live ones as they are at this moment.

    `tell` hears of rows, first as each part is verified, then as they are written.

    Raises what `open_log` raises, LogUnreadable for a part that does not verify, KeyMismatch for parts under several
    keys, LogExists, SequenceConflict, OSError. The parts are not touched.
    """
    target = Path(out)
    refuse_leftovers(target)
    with ExitStack() as held, claimed(target) as fresh:
        logs = [held.enter_context(open_log(path)) for path in parts_of([Path(p) for p in paths])]
        _check(logs, [Path(p) for p in paths], tell)
        meta = _meta(logs)
        build_file(fresh, {**meta, "sealed": "true"})
        head, events = _append_all(logs, meta, fresh, tell)
        head = publish_sealed(fresh, target, head)
        sources = tuple((log.path.name, log.chain_digest) for log in logs)
    return MergeReport(events, len(head.sessions), head.batch, head.rows, head.digest, sources)


def _check(logs: Sequence[Log], paths: Sequence[Path], tell: Tell) -> None:
    if not logs:
        raise LogUnreadable(f"{', '.join(map(str, paths))}: no segment there, nothing to merge")
    keys = {log.meta.get("key_id") for log in logs}
    if len(keys) > 1:
        raise KeyMismatch(
            f"{', '.join(sorted(log.path.name for log in logs))}: recorded under {len(keys)} keys, so their content "
            f"hashes do not compare; merge logs of one folder"
        )
    for log in logs:
        found = verify(log.path, tell_of(tell, f"checking {log.path.name}")).findings
        if found:
            raise LogUnreadable(f"{log.path}: does not verify ({found[0].detail}); nothing was merged")
    union(paths[0], [Part(log.path.name, log.meta, file=log.source) for log in logs]).close()


def _meta(logs: Sequence[Log]) -> dict[str, str]:
    """Meta rows of the new log; its id follows from its parts, so that merging the same again gives the same log."""
    parts = [[log.meta["log_id"], log.chain_digest] for log in logs]
    text = json.dumps(parts, separators=(",", ":"))
    same = {name: logs[0].meta[name] for name in ("format", "key_id")}
    versions = sorted({log.meta["kvtape_version"] for log in logs})
    log_id = hashlib.blake2b(b"kvtape merged log" + text.encode(), digest_size=8).hexdigest()
    more = {
        "schema_version": str(SCHEMA_VERSION),
        "kvtape_version": versions[-1],
        "definitions": definitions_digest(),
        "log_id": log_id,
        "merged_from": text,
    }
    return {**same, **more}


def _append_all(logs: Sequence[Log], meta: Mapping[str, str], fresh: Path, tell: Tell) -> tuple[Head, int]:
    digest, batch, rows, runs = genesis(meta), 0, 0, set[str]()
    connection = duckdb.connect(str(fresh), config={"threads": "1"})
    try:
        connection.execute("BEGIN")
        stored_of = [(log, stored_batches(log.connection)) for log in logs]
        total = sum(each.summary.rows for _, stored in stored_of for each in stored)
        for log, stored in stored_of:
            for window in chain_windows(stored):
                slices = {t.name: _by_batch(log, t, window) for t in ROW_TABLES}
                for old in window:
                    tables = {name: found[old.batch] for name, found in slices.items() if found[old.batch].num_rows}
                    tables = _without_known_runs(tables, runs)
                    if not tables:
                        continue
                    summary = summarise(tables)
                    batch, rows, previous = batch + 1, rows + summary.rows, digest
                    digest = link(previous, batch, summary)
                    row = (batch, summary.rows, summary.spans, summary.tables, previous, digest)
                    insert_batch(connection, tables, row)
                    tell(rows, total, "writing")
        connection.execute("COMMIT")
        connection.execute("CHECKPOINT")
        sessions = last_seqs(stored_batches(connection))
        events = int(connection.execute("SELECT count(*) FROM events").fetchall()[0][0])
    finally:
        connection.close()
    return Head(meta["log_id"], batch, digest.hex(), rows, sessions, ""), events


def _by_batch(log: Log, table: Table, window: list[StoredBatch]) -> dict[int, pa.Table]:
    """Rows by their old batch number, which is no column of theirs any more."""
    return {stored.batch: rows.drop_columns(["batch"]) for stored, rows in batch_slices(log.connection, table, window)}


def _without_known_runs(tables: dict[str, pa.Table], known: set[str]) -> dict[str, pa.Table]:
    if RUNS.name not in tables:
        return tables
    ids = tables[RUNS.name].column("run_id").to_pylist()
    fresh = [run not in known for run in ids]
    known.update(ids)
    kept = tables[RUNS.name].filter(pa.array(fresh))
    return tables | {RUNS.name: kept} if kept.num_rows else {n: t for n, t in tables.items() if n != RUNS.name}


def merge_to_parquet(paths: Sequence[str | Path], out: str | Path, tell: Tell = silent) -> MergeReport:
    """The same, written as Parquet files (see `parquet_files`), which `parquet://` opens. Raises the same."""
    target = Path(out)
    if target.exists():
        raise LogExists(f"{target}: already there; kvtape writes over nothing, choose another folder")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        merged = Path(scratch) / "merged.duckdb"
        report = merge(paths, merged, tell)
        connection = open_read_only(merged, merged, confined=False)
        try:
            write_parquet(connection, target, tell)
        finally:
            connection.close()
    return report
