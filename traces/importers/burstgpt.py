"""BurstGPT traces, all versions: CSV in seconds, columns by name.

Version 3 puts `Session ID` and `Elapsed time` into the middle and does not start at 0. A row with 0 response tokens
is a failed request; an API row has no session, and then is one of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from sys import intern
from typing import Any

from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import Asked, Record, Request, Rules
from kvtape.traces.importers.source import Source
from kvtape.traces.importers.table import csv_header, csv_rows
from kvtape.traces.importers.values import SECOND, duration_ns, whole

__all__ = ["BURSTGPT", "BurstGPT"]

_NEEDED = ("Timestamp", "Model", "Request tokens", "Response tokens", "Log Type")
_OPTIONAL = ("Total tokens", "Session ID", "Elapsed time")


class BurstGPT:
    name = "burstgpt"
    summary = "BurstGPT traces, versions 1 to 3 (CSV Timestamp, Model, Request tokens, Response tokens, ...)"
    rules = Rules("seconds")

    def recognises(self, head: bytes, name: str) -> bool:
        return set(_NEEDED) <= set(csv_header(head))

    def read(self, source: Source, notes: Notes, asked: Asked) -> Iterator[Record]:
        rows = csv_rows(source, _NEEDED, _OPTIONAL, drop_repeated=asked.drop_duplicates)
        details: dict[str, dict[str, Any]] = {"": {}}  # few of them, and many rows
        for stamp, model, request, response, kind, total, session, elapsed in rows:
            n_in, n_out = whole(source, "Request tokens", request), whole(source, "Response tokens", response)
            if total and whole(source, "Total tokens", total) != n_in + n_out:
                text = "Total tokens is not the sum of request and response; the two are taken as they are"
                notes.warn("total_differs", source.name, source.line, text)
            if not n_out:
                notes.warn("zero_output", source.name, source.line, "no response tokens: a failed request; kept")
            yield Request(
                line=source.line,
                at_ns=duration_ns(source, "Timestamp", stamp, SECOND),
                input_tokens=n_in,
                output_tokens=n_out,
                session=session.strip() or None,
                elapsed_ns=duration_ns(source, "Elapsed time", elapsed, SECOND) if elapsed else None,
                model=intern(model) or None,
                detail=details.setdefault(kind, {"type": kind}),
            )


BURSTGPT = BurstGPT()
