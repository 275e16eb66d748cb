"""The hash chain over batches: one SHA-256 per batch, each over the one before.

digest_k = SHA-256(digest_{k-1}, batch number, rows, spans, table digests); digest_0 is taken over the meta rows, so
a batch belongs to one place in one log.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from kvtape.traces.canonical import table_digest
from kvtape.traces.schema import ROW_TABLES

__all__ = ["LATER_META", "BatchSummary", "batch_summary", "genesis", "link", "recorded_spans", "span_list", "summarise"]

LATER_META = ("sealed", "repaired", "redacted")
"""Meta rows that a log does not begin with."""

Span = tuple[str, str, int, int]
"""run, session, first seq, last seq."""


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """What the chain covers of one batch; the texts are JSON as stored in `batches`."""

    rows: int
    spans: str
    tables: str


def genesis(meta: Mapping[str, str]) -> bytes:
    """The digest before the first batch: over every meta row but those that come later."""
    fixed = {k: v for k, v in meta.items() if k not in LATER_META}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True, separators=(",", ":")).encode()).digest()


def summarise(tables: Mapping[str, pa.Table]) -> BatchSummary:
    """Summary of a batch from its rows per table, each in canonical order."""
    digests = {
        table.name: (data.num_rows, table_digest(table.chained, data))
        for table in ROW_TABLES
        if (data := tables.get(table.name)) is not None and data.num_rows
    }
    return batch_summary(digests, span_list(tables["events"]) if "events" in tables else [])


def batch_summary(digests: Mapping[str, tuple[int, bytes]], spans: Iterable[Span]) -> BatchSummary:
    """Summary from each table's number of rows and digest, in the order of `ROW_TABLES`, and the events' spans."""
    stored = {name: [count, digest.hex()] for name, (count, digest) in digests.items()}
    return BatchSummary(sum(count for count, _ in digests.values()), _compact(spans), _compact(stored))


def span_list(events: pa.Table) -> list[Span]:
    """First and last seq of each session, in (run, session) order, of events in canonical order."""
    if events.num_rows == 0:
        return []
    runs = events.column("run_id").combine_chunks().dictionary_encode()
    sessions = events.column("session_id").combine_chunks().dictionary_encode()
    if len(runs.dictionary) == 1 and len(sessions.dictionary) == 1:
        seqs = events.column("seq")
        return [(runs[0].as_py(), sessions[0].as_py(), seqs[0].as_py(), seqs[-1].as_py())]
    grouped = events.group_by(["run_id", "session_id"]).aggregate([("seq", "min"), ("seq", "max")])
    columns = [grouped.column(name).to_pylist() for name in ("run_id", "session_id", "seq_min", "seq_max")]
    return sorted(zip(*columns, strict=True))


def recorded_spans(summary: BatchSummary) -> list[Span]:
    """`spans` of a stored batch; empty when somebody made something else of the text, which its digest tells."""
    try:
        return [
            (str(run), str(session), int(first), int(last)) for run, session, first, last in json.loads(summary.spans)
        ]
    except (ValueError, TypeError):
        return []


def link(previous: bytes, batch: int, summary: BatchSummary) -> bytes:
    """The digest of a batch."""
    digest = hashlib.sha256(previous)
    digest.update(struct.pack("<QQ", batch, summary.rows))
    for text in (summary.spans, summary.tables):
        raw = text.encode()
        digest.update(struct.pack("<Q", len(raw)))
        digest.update(raw)
    return digest.digest()


def _compact(value: Iterable[object]) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
