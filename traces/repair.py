"""Repair: what is whole of a log that was never sealed goes into a new, sealed one; what was cut is said exactly.

A recorder that was killed leaves a log that only lacks its seal. A torn write leaves a write-ahead log that DuckDB
refuses from some byte on, or silently reads up to there. Both end in whole batches, since a transaction
holds whole ones. Repair works on copies and never writes the log it reads. A log that was changed in its middle is not
torn, and nothing is made of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import duckdb

from kvtape.traces.chain_check import check_chain, last_seqs, stored_batches
from kvtape.traces.database import (
    check_file_kind,
    open_read_only,
    read_meta,
    readable,
    refuse_leftovers,
    wal_path,
)
from kvtape.traces.errors import LogLocked, LogMissing, LogUnreadable
from kvtape.traces.findings import Finding, FindingKind
from kvtape.traces.keys import key_path
from kvtape.traces.leftovers import claimed, leftovers
from kvtape.traces.live import drop_stale_wal, held_elsewhere, recorded_here, snapshot
from kvtape.traces.seal import copy_rows, publish_sealed
from kvtape.traces.sidecar import Head, head_path, read_head
from kvtape.traces.telling import Tell, silent
from kvtape.traces.upcast import bring_up

__all__ = ["Cut", "RepairReport", "repair"]

_TORN_AT = re.compile(r"byte position (\d+)")


@dataclass(frozen=True, slots=True)
class Cut:
    """What is gone.

    `batches`: first and last that were acknowledged and are not there, None when none is missing; `sessions`:
    "run/session" -> first and last lost seq, `events` their number; `wal_bytes` cut off the write-ahead log.
    """

    batches: tuple[int, int] | None
    events: int
    sessions: Mapping[str, tuple[int, int]]
    wal_bytes: int

    def __bool__(self) -> bool:
        return self.batches is not None or self.wal_bytes > 0

    @property
    def text(self) -> str:
        """One line: it also stands in the new log."""
        parts = []
        if self.batches is not None:
            parts.append(f"acknowledged batches {self.batches[0]} to {self.batches[1]} are lost ({self.events} events)")
            parts += [f"{name} seq {first} to {last}" for name, (first, last) in self.sessions.items()]
        if self.wal_bytes:
            parts.append(f"{self.wal_bytes} bytes of the write-ahead log were cut off")
        return "; ".join(parts) or "nothing was cut"


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What stands in the new log, what was cut, and what was found beside the old one; `digest` is the new chain's."""

    batches: int
    rows: int
    events: int
    unacknowledged: int
    digest: str
    cut: Cut
    notes: tuple[str, ...]
    leftovers: tuple[Path, ...]


def repair(path: str | Path, out: str | Path, tell: Tell = silent) -> RepairReport:
    """Make `out` of what is whole in the log `path`; tells the rows that were checked.

    Raises LogMissing, NotALog, LogTooNew, LogExists (`out`), LogLocked (somebody is recording), LogUnreadable
    (damaged otherwise than by a torn tail; nothing is made then), OSError.
    """
    source, target = Path(path), Path(out)
    if not source.is_file():
        raise LogMissing(f"{source}: no such log; give the path of a log file")
    if recorded_here(source) or held_elsewhere(source):
        raise LogLocked(f"{source}: being recorded; repair is for a log whose recorder is gone")
    refuse_leftovers(target)
    with claimed(target) as fresh:
        folder = fresh.with_name(fresh.name + ".d")
        folder.mkdir()
        copy = snapshot(source, folder)
        check_file_kind(copy, source)
        drop_stale_wal(copy, source)
        connection, wal_bytes = _open_whole_part(copy, source)
        try:
            head, report = _copy_out(connection, source, copy, fresh, wal_bytes, tell)
        finally:
            connection.close()
        publish_sealed(fresh, target, head)
    return report


def _open_whole_part(copy: Path, shown: Path) -> tuple[duckdb.DuckDBPyConnection, int]:
    """The copy opened, its write-ahead log cut where DuckDB refuses it; how many bytes that were."""
    wal, cut = wal_path(copy), 0
    while True:
        try:
            return open_read_only(copy, shown, confined=False), cut
        except LogUnreadable as err:
            found = _TORN_AT.search(str(err))
            size = wal.stat().st_size if wal.exists() else 0
            position = int(found.group(1)) if found else size
            if position >= size:
                raise LogUnreadable(f"{err}: no torn tail, so nothing can be cut; put a copy back") from None
            with wal.open("r+b") as handle:
                handle.truncate(position)
            cut += size - position


def _copy_out(
    connection: duckdb.DuckDBPyConnection, source: Path, copy: Path, fresh: Path, wal_bytes: int, tell: Tell
) -> tuple[Head, RepairReport]:
    meta = read_meta(connection, source)
    with readable(source):
        bring_up(connection, int(meta["schema_version"]))
    notes = []
    try:
        old = read_head(copy, source)
    except ValueError as err:
        old = None
        notes.append(str(err))
    if old is None:
        notes.append(f"without {head_path(source).name} nobody can tell whether acknowledged batches are gone")
    with readable(source):
        report = check_chain(connection, meta, old, tell)
        _refuse_changes(source, report.findings)
        batches = stored_batches(connection)
        seqs = last_seqs(batches)
        acknowledged = batches[-1].batch if batches and old is None else 0 if old is None else old.batch
        counts = connection.execute(
            "SELECT count(*), count(*) FILTER (batch > ?) FROM events", [acknowledged]
        ).fetchall()[0]
    cut = Cut(*_lost(old, len(batches), seqs), wal_bytes)
    extra = {"repaired": _told(meta, cut)} if cut else {}
    head = Head(meta["log_id"], report.batches, report.digest, report.rows, seqs, "")
    copy_rows(connection, {**meta, "sealed": "true", **extra}, fresh)
    return head, RepairReport(
        report.batches,
        report.rows,
        counts[0],
        counts[1],
        report.digest,
        cut,
        tuple(notes),
        tuple(leftovers(source, key_path(source))),
    )


def _told(meta: Mapping[str, str], cut: Cut) -> str:
    before = meta.get("repaired")
    return cut.text if before is None else f"{before}; later {cut.text}"


def _refuse_changes(source: Path, findings: list[Finding]) -> None:
    other = [f for f in findings if f.kind is not FindingKind.LOST_TAIL]
    if other:
        raise LogUnreadable(
            f"{source}: {other[0].detail}: that is no torn tail, so nothing was made of it; `kvtape verify` lists all"
        )


def _lost(
    head: Head | None, stored: int, seqs: Mapping[str, int]
) -> tuple[tuple[int, int] | None, int, dict[str, tuple[int, int]]]:
    if head is None or head.batch <= stored:
        return None, 0, {}
    lost = {
        name: (seqs.get(name, -1) + 1, last)
        for name, last in sorted(head.sessions.items())
        if last > seqs.get(name, -1)
    }
    return (stored + 1, head.batch), sum(last - first + 1 for first, last in lost.values()), lost
