"""What an import refuses: one line that names file, line, field and remedy. Nothing has been written then."""

from __future__ import annotations

from kvtape.traces.errors import TraceError

__all__ = ["SourceRejected"]


class SourceRejected(TraceError):
    """The source is not what its format says. `line` is 1-based; None where the file as a whole is meant."""

    def __init__(self, file: str, line: int | None, field: str | None, what: str, remedy: str) -> None:
        where = file if line is None else f"{file}, line {line}"
        if field is not None:
            where += f", {field}"
        super().__init__(f"{where}: {what}; {remedy}; nothing was imported")
        self.file, self.line, self.field = file, line, field
