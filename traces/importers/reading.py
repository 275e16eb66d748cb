"""`read_trace`: the records of files of one format, in the order in which they count. Knows nothing of logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtape.traces.errors import TraceError
from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import Asked, Reader, Record
from kvtape.traces.importers.registry import reader_for
from kvtape.traces.importers.source import Source
from kvtape.traces.telling import Tell, silent

__all__ = ["Trace", "read_trace"]


@dataclass(slots=True)
class Trace:
    """What was read of all files."""

    reader: Reader
    records: list[tuple[Record, str]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    duplicates: int = 0


def read_trace(
    files: Sequence[str | Path],
    format_name: str,
    asked: Asked,
    notes: Notes,
    first: Source | None = None,
    tell: Tell = silent,
) -> Trace:
    """Every record with the session it belongs to, in the order in which it will be written. Raises SourceRejected.

    `first`: `files[0]`, opened already, as stdin can be opened only once; it is closed here.
    `tell` hears of the bytes of each.
    """
    trace: Trace | None = None
    for i, file in enumerate(files):
        with first if first is not None and i == 0 else Source(file) as source:
            source.watch(tell)
            reader = reader_for(format_name, source)
            if trace is None:
                trace = Trace(reader)
            elif reader.name != trace.reader.name:
                what = f"is of format {reader.name}, the files before it of {trace.reader.name}"
                raise source.rejected(None, what, "import one format at a time", whole=True)
            own = f"{source.stem}:" if len(files) > 1 else ""
            trace.records += [(r, _session_id(r, own)) for r in reader.read(source, notes, asked)]
            trace.digests.append(source.digest())
            trace.duplicates += len(source.repeated)
            if source.repeated:
                text = "left out" if source.leaves_out_repeated else "kept, --drop-duplicates leaves them out"
                text = f"rows that were there before, byte for byte; {text}"
                notes.warn("duplicate_rows", source.name, source.repeated[0], text, len(source.repeated))
    if trace is None or not trace.records:
        name = ", ".join(map(str, files)) or "no file"
        raise TraceError(f"{name}: no request in it; nothing was imported")
    if not trace.reader.rules.ordered:
        trace.records.sort(key=lambda pair: pair[0].at_ns)  # stable, so equal stamps stay in file order
    return trace


def _session_id(record: Record, own: str) -> str:
    """Sessions that the source names keep their name; a request without one is a session of its own."""
    return record.session if record.session is not None else f"{own}line-{record.line:07d}"
