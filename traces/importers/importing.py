"""`import_trace`: files of one format into a new log.

Everything is read and checked before the log is begun, so a bad line anywhere leaves no log behind.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtape.planner.rows import RunRow
from kvtape.traces.importers.events import EventMaker
from kvtape.traces.importers.log_lines import is_log_lines, restore_log
from kvtape.traces.importers.notes import Notes, Warned
from kvtape.traces.importers.protocol import Asked, Reader, Record
from kvtape.traces.importers.reading import Trace, read_trace
from kvtape.traces.importers.registry import AUTO, LOG_LINES
from kvtape.traces.importers.source import Source
from kvtape.traces.importers.writing import Batch, record_batches, write_new_log
from kvtape.traces.telling import Tell, silent

__all__ = ["ImportResult", "import_config", "import_run", "import_trace"]

_DAY_NS = 86_400 * 10**9
_LONG_NS, _SHORT_NS = 62 * _DAY_NS, 1_000_000


@dataclass(frozen=True, slots=True)
class ImportResult:
    """`rows`: requests or events of the source. `duplicates`: rows that were there before, byte for byte."""

    format: str
    rows: int
    sessions: int
    events: int
    duplicates: int
    folded: int
    span_ns: int
    warnings: list[Warned]


def import_trace(
    files: Sequence[str | Path],
    log: Path,
    *,
    kvtape_version: str,
    format_name: str = AUTO,
    asked: Asked | None = None,
    content: bool = False,
    tell: Tell = silent,
) -> ImportResult:
    """Import `files` (`-` is stdin), all of one format, as one run of kind `import` into the new, sealed log.

    `tell` hears of the bytes that are read, then of the rows that are written.

    Raises SourceRejected for what cannot be read, LogExists, LogWriteFailed. In each case there is no log.
    """
    first = Source(files[0]) if files else None
    if first is not None:
        first.watch(tell)
    restored = _restored(files, first, log, format_name)
    if restored is not None:
        return restored
    asked = asked or Asked()
    notes = Notes()
    trace = read_trace(files, format_name, asked, notes, first, tell)
    times = [record.at_ns for record, _ in trace.records]
    zero, last = min(times), max(times)
    n_records = len(trace.records)
    _check_span(trace, last - zero, notes)
    run = _run_row(trace, zero, asked, kvtape_version=kvtape_version, content=content)
    counts = {"events": 0, "sessions": 0}

    def batches(key: bytes) -> Iterator[Batch]:
        maker = EventMaker(run.run_id, trace.reader.name, zero, key, content=content)
        for batch in record_batches(_drained(trace.records), maker):
            tell(n_records - len(trace.records), n_records, "rows to write")
            counts["events"] += batch["events"].num_rows if "events" in batch else 0
            yield batch
        counts["sessions"] = maker.n_sessions

    write_new_log(log, run, batches)
    return ImportResult(
        format=trace.reader.name,
        rows=n_records + notes.folded,
        sessions=counts["sessions"],
        events=counts["events"],
        duplicates=trace.duplicates,
        folded=notes.folded,
        span_ns=last - zero,
        warnings=notes.warnings(),
    )


def _restored(files: Sequence[str | Path], first: Source | None, log: Path, format_name: str) -> ImportResult | None:
    """kvtape's own lines are a log already: its runs, batches and digests come back.

    None for any other source; `first`, the opened `files[0]`, is then still open and at its beginning.
    """
    if first is None or not (format_name == LOG_LINES or (format_name == AUTO and is_log_lines(first.head))):
        return None
    with first as source:
        if len(files) > 1:
            raise source.rejected(
                None, "one of several files", "import each log by itself, then merge them", whole=True
            )
        made = restore_log(source, log)
    return ImportResult(LOG_LINES, made.rows, made.sessions, made.events, 0, 0, made.span_ns, [])


def _drained(records: list[tuple[Record, str]]) -> Iterator[tuple[Record, str]]:
    """In their order, taken out of the list, so that what is written is held no longer."""
    records.reverse()
    while records:
        yield records.pop()


def _check_span(trace: Trace, span: int, notes: Notes) -> None:
    unit = trace.reader.rules.time_unit
    if span > _LONG_NS:
        text = f"the trace spans {span / _DAY_NS:.0f} days: its stamps are read as {unit}; look whether they are"
        notes.warn("span_long", "all files", None, text)
    elif len(trace.records) > 1 and 0 < span < _SHORT_NS:
        text = f"the trace spans {span / 1000:.1f} us: its stamps are read as {unit}; look whether they are"
        notes.warn("span_short", "all files", None, text)


def import_config(reader: Reader, asked: Asked, *, content: bool) -> dict[str, Any]:
    """The configuration of an import: what is equal for the same requests, however they came."""
    rules = reader.rules
    return {
        "verb": "import",
        "format": reader.name,
        "time_unit": rules.time_unit,
        "block_tokens": asked.block_tokens or rules.block_tokens,
        "block_rule": rules.block_rule,
        "id_scope": rules.id_scope,
        "drop_duplicates": asked.drop_duplicates,
        "content": content,
    }


def import_run(config: Mapping[str, Any], source: Sequence[str], zero: int, *, kvtape_version: str) -> RunRow:
    """A run's row; its id comes from `config` and from what tells the `source`, so an import repeated is one run."""
    text = _canonical(config)
    made_of = hashlib.sha256(_canonical([text, *source]).encode()).hexdigest()
    return RunRow(
        run_id=f"import-{made_of[:12]}",
        kind="import",
        config_digest=hashlib.sha256(text.encode()).hexdigest(),
        config=text,
        kvtape_version=kvtape_version,
        engine_versions="{}",
        started_at_ns=zero,
    )


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _run_row(trace: Trace, zero: int, asked: Asked, *, kvtape_version: str, content: bool) -> RunRow:
    """What can be followed has no digest in its configuration: a log that grows has none, and is the same run."""
    config = import_config(trace.reader, asked, content=content)
    if not trace.reader.rules.ordered:
        config["sha256"] = trace.digests
    return import_run(config, trace.digests, zero, kvtape_version=kvtape_version)
