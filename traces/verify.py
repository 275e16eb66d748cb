"""Verify a log: every row against the chain, the chain against the sidecar, token ids against their keyed hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvtape.planner.residency import IllegalEvent, ResidencyMismatch, fold
from kvtape.traces.chain_check import check_chain
from kvtape.traces.content_check import check_content, holds_content
from kvtape.traces.database import readable, wal_path
from kvtape.traces.definitions import check_definitions, same_definitions
from kvtape.traces.errors import LogUnreadable
from kvtape.traces.findings import Finding, FindingKind
from kvtape.traces.folder import segments
from kvtape.traces.keys import key_path, stored_key
from kvtape.traces.leftovers import leftovers
from kvtape.traces.live import held_elsewhere, recorded_here
from kvtape.traces.reader import Log, open_log
from kvtape.traces.sidecar import file_digest
from kvtape.traces.telling import Tell, silent, tell_of
from kvtape.traces.union import open_folder, open_parquet, parquet_parts, parquet_place

__all__ = ["Finding", "FindingKind", "VerifyResult", "verify"]


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """`ok` when nothing was found. `rows` of all tables, number of `batches`, `chain_digest` (hex) of the last."""

    ok: bool
    findings: tuple[Finding, ...]
    rows: int
    batches: int
    chain_digest: str
    notice: str | None = None


def verify(path: str | Path, tell: Tell = silent) -> VerifyResult:
    """Recompute the chain of the log, or of every part of a log folder or of logs written out as Parquet.

    `tell` hears how many rows of the part at hand are done.

    Raises LogMissing, NotALog, LogTooNew, LogUnreadable, SequenceConflict; never for a finding.
    """
    where = parquet_place(path)
    if where is not None:
        return _together([_verify_parquet(out, tell) for out in parquet_parts(where)], [], [])
    if Path(path).is_dir():
        return _verify_folder(Path(path), tell)
    return _verify_file(Path(path), tell)


def _verify_folder(folder: Path, tell: Tell) -> VerifyResult:
    with open_folder(folder, torn=True):
        pass  # whether the parts go together
    results, findings, notices = [], [], []
    for segment in segments(folder):
        name = segment.path.name
        if not segment.there:
            findings.append(Finding(FindingKind.SEGMENT_MISSING, f"{name} is in the manifest and not in the folder"))
            continue
        result = _verify_file(segment.path, tell_of(tell, name))
        results.append(result)
        findings += [replace(f, detail=f"{name}: {f.detail}") for f in result.findings]
        if not segment.registered:
            notices.append(f"{name} is not in the manifest: its recorder died while it began, or it was put there")
        if segment.sealed_digest not in (None, result.chain_digest):
            findings.append(Finding(FindingKind.SEGMENT_FOREIGN, f"{name} is not the segment that was sealed"))
        if result.notice:
            notices.append(f"{name}: {result.notice}")
    return _together(results, findings, notices)


def _verify_parquet(out: str, tell: Tell) -> VerifyResult:
    with open_parquet(out) as log, readable(log.path):
        report = check_chain(log.connection, dict(log.parts[0].meta), None, tell)
    findings = [replace(f, detail=f"{out}: {f.detail}") for f in report.findings]
    return VerifyResult(not findings, tuple(findings), report.rows, report.batches, report.digest)


def _together(results: Sequence[VerifyResult], findings: Sequence[Finding], notices: Sequence[str]) -> VerifyResult:
    everything = [*findings] or [f for r in results for f in r.findings]
    digests = sorted(r.chain_digest for r in results)
    digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return VerifyResult(
        not everything,
        tuple(everything),
        sum(r.rows for r in results),
        sum(r.batches for r in results),
        digest,
        "; ".join(notices) or None,
    )


def _verify_file(path: Path, tell: Tell) -> VerifyResult:
    with open_log(path, torn=True) as log:
        with readable(log.path):
            report = check_chain(log.connection, log.meta, log.head, tell)
            key = stored_key(log.path, log.meta.get("key_id"))
            content = [] if key is None else list(check_content(log.connection, key))
            findings = [*report.findings, *content, *_fold_findings(log, report.findings), *_head_findings(log)]
            findings += [*check_definitions(log.connection, log.meta), *_file_findings(log)]
            notices = [] if log.notice is None else [log.notice]
            if key is None and holds_content(log.connection):
                notices.append(f"{key_path(log.path).name} is not there or not this log's: token ids were not checked")
        notices += _remarks(log)
        notice = "; ".join(notices) or None
        return VerifyResult(not findings, tuple(findings), report.rows, report.batches, report.digest, notice)


def _remarks(log: Log) -> Iterator[str]:
    if not same_definitions(log.meta):
        version = log.meta.get("kvtape_version", "?")
        yield f"its views and triggers are those of kvtape {version}, which this kvtape does not know: not compared"
    if not recorded_here(log.path) and not held_elsewhere(log.path):
        left = leftovers(log.path, key_path(log.path))
        if left:
            names = ", ".join(p.name for p in left)
            yield f"left by a process that died, no part of the log, may be removed: {names}"


def _head_findings(log: Log) -> list[Finding]:
    if log.head is not None:
        return []
    missing = log.head_problem is None or "missing" in log.head_problem
    kind = FindingKind.HEAD_MISSING if missing else FindingKind.HEAD_DAMAGED
    return [Finding(kind, f"{log.head_problem}: whether the end of the log is lost cannot be told")]


def _file_findings(log: Log) -> Iterator[Finding]:
    """Bytes that hold no row are no part of the chain, yet a disk that changes them is not to be trusted."""
    head = log.head
    if head is None or head.log_id != log.meta.get("log_id") or (log.sealed and not head.sealed):
        return  # the last: a crash between sealing the file and its sidecar, which is still the old file's
    if not log.sealed and not wal_path(log.source).exists():
        return  # another DuckDB client opened the log to write, and put the rows into the file on closing
    if file_digest(log.source) != head.file:
        yield Finding(FindingKind.FILE, "the bytes of the database file are not those that were written")


def _fold_findings(log: Log, findings: list[Finding]) -> list[Finding]:
    """Where events were changed, the first event that the fold rejects is close to the culprit."""
    kinds = (FindingKind.ALTERED, FindingKind.REORDERED, FindingKind.MISSING, FindingKind.REPEATED)
    batches = [f.batch for f in findings if f.table == "events" and f.kind in kinds]
    if not batches:
        return []
    rows = log.connection.execute(
        "SELECT DISTINCT run_id, session_id FROM events WHERE list_contains(?, batch) ORDER BY ALL", [batches]
    ).fetchall()
    rejected = []
    for run, session in rows:
        try:
            fold(log.events(run, session))
        except (IllegalEvent, ResidencyMismatch) as err:
            batch = log.connection.execute(
                "SELECT min(batch) FROM events WHERE run_id = ? AND session_id = ? AND seq = ?",
                [run, session, err.event.seq],
            ).fetchall()[0][0]
            rejected.append(Finding(FindingKind.FOLD, f"the fold rejects {err}", batch, "events"))
        except (LogUnreadable, ValueError) as err:
            rejected.append(Finding(FindingKind.FOLD, f"run {run} session {session}: {err}", None, "events"))
    return rejected
