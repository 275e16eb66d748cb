"""Importing small samples, and finding the public trace files where they lie beside the repository."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtape.traces.importers.errors import SourceRejected
from kvtape.traces.importers.importing import ImportResult, import_trace
from kvtape.traces.importers.notes import Notes, Warned
from kvtape.traces.importers.protocol import Asked
from kvtape.traces.importers.reading import read_trace
from kvtape.traces.reader import Log, open_log
from support.repository import ROOT

__all__ = ["Read", "column", "imported", "public_trace", "read", "refused", "result_of", "written"]


@dataclass(frozen=True)
class Read:
    """What a sample was read as, without a log; `records` in the order in which they would be written."""

    format: str
    records: list[Any]
    sessions: list[str]
    duplicates: int
    warnings: list[Warned]
    folded: int

    @property
    def kinds(self) -> list[str]:
        return [w.kind for w in self.warnings]


def read(folder: Path, data: bytes | str | list[Path], name: str = "sample", **options: Any) -> Read:
    """Read a sample (bytes or text of a file called `name`, or files that are there)."""
    asked = Asked(options.pop("block_tokens", None), options.pop("drop_duplicates", False))
    files = data if isinstance(data, list) else [written(folder, data, name)]
    notes = Notes()
    trace = read_trace(files, options.pop("format_name", "auto"), asked, notes)
    assert not options
    records = [record for record, _ in trace.records]
    sessions = [session for _, session in trace.records]
    return Read(trace.reader.name, records, sessions, trace.duplicates, notes.warnings(), notes.folded)


@contextmanager
def imported(folder: Path, data: bytes | str | list[Path], name: str = "sample", **options: Any) -> Iterator[Log]:
    """The log of a sample (bytes or text of a file called `name`, or files that are there); `log.result` beside it."""
    asked = Asked(options.pop("block_tokens", None), options.pop("drop_duplicates", False))
    files = data if isinstance(data, list) else [written(folder, data, name)]
    log = folder / f"{name}.duckdb"
    result = import_trace(files, log, kvtape_version="0.1.0", asked=asked, **options)
    with open_log(log) as tape:
        tape.result = result  # type: ignore[attr-defined]
        yield tape


def written(folder: Path, data: bytes | str, name: str) -> Path:
    file = folder / name
    file.write_bytes(data.encode() if isinstance(data, str) else data)
    return file


def refused(folder: Path, data: bytes | str, name: str = "bad", **options: Any) -> SourceRejected:
    """The error that a sample is refused with, before there is any log."""
    with pytest.raises(SourceRejected) as caught:
        read(folder, data, name, **options)
    return caught.value


def column(log: Log, query: str) -> list[Any]:
    """First column of a query."""
    return [row[0] for row in log.sql(query)[1]]


def public_trace(name: str) -> Path:
    """A file of the public traces; the test is skipped where they are not there."""
    path = ROOT.parent / "shared" / "traces" / name
    if not path.exists():
        pytest.skip(f"the public trace {name} is not here")
    return path


def result_of(log: Log) -> ImportResult:
    return log.result  # type: ignore[attr-defined, no-any-return]
