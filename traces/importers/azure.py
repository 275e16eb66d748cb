"""Azure LLM inference traces of 2023: CSV TIMESTAMP, ContextTokens, GeneratedTokens.

Wall-clock stamps without a zone and with 7 fractional digits, CRLF, no final newline; lengths only, no block ids.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import Asked, Record, Request, Rules
from kvtape.traces.importers.source import Source
from kvtape.traces.importers.stamps import WallClock
from kvtape.traces.importers.table import csv_header, csv_rows
from kvtape.traces.importers.values import whole

__all__ = ["AZURE", "Azure"]

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class Azure:
    name = "azure"
    summary = "Azure LLM inference traces (CSV TIMESTAMP, ContextTokens, GeneratedTokens)"
    rules = Rules("wall clock")

    def recognises(self, head: bytes, name: str) -> bool:
        return set(_COLUMNS) <= set(csv_header(head))

    def read(self, source: Source, notes: Notes, asked: Asked) -> Iterator[Record]:
        clock = WallClock(source, notes)
        for stamp, context, generated in csv_rows(source, _COLUMNS, drop_repeated=asked.drop_duplicates):
            yield Request(
                line=source.line,
                at_ns=clock.unix_ns("TIMESTAMP", stamp),
                input_tokens=whole(source, "ContextTokens", context),
                output_tokens=whole(source, "GeneratedTokens", generated),
            )


AZURE = Azure()
