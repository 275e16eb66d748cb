"""The hash chain over batches: one SHA-256 per transaction, each over the one before.

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

__all__ = ["LATER_META", "BatchSummary", "genesis", "link", "recorded_spans", "span_list", "summarise"]

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
    digests: dict[str, list[int | str]] = {}
    rows = 0
    for table in ROW_TABLES:
        data = tables.get(table.name)
        if data is None or data.num_rows == 0:
            continue
        rows += data.num_rows
        digests[table.name] = [data.num_rows, table_digest(table.chained, data).hex()]
    spans = span_list(tables["events"]) if "events" in tables else []
    return BatchSummary(rows, _compact(spans), _compact(digests))


def span_list(events: pa.Table) -> list[Span]:
    """First and last seq of each session, in (run, session) order, of events in canonical order."""
    if events.num_rows == 0:
        return []
    runs = events.column("run_id").combine_chunks().dictionary_encode()
    sessions = events.column("session_id").combine_chunks().dictionary_encode()
    if len(runs.dictionary) == 1 and len(sessions.dictionary) == 1:
        seqs = events.column("seq")
        return [(runs[0].as_py(), sessions[0].as_py(), seqs[0].as_py(), seqs[-1].as_py())]
    grouped = events.group_by(["run_id", "session_id"]).aggregate([("seq", "min"), ("seq", "max")]).to_pylist()
    return sorted((g["run_id"], g["session_id"], g["seq_min"], g["seq_max"]) for g in grouped)


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
