"""Vidur request traces: CSV num_prefill_tokens, num_decode_tokens, and arrived_at (seconds) in some of them."""

from __future__ import annotations

from collections.abc import Iterator

from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import Asked, Record, Request, Rules
from kvtape.traces.importers.source import Source
from kvtape.traces.importers.table import csv_header, csv_rows
from kvtape.traces.importers.values import SECOND, duration_ns, whole

__all__ = ["VIDUR", "Vidur"]

_NEEDED = ("num_prefill_tokens", "num_decode_tokens")
_OPTIONAL = ("arrived_at", "num_total_tokens")


class Vidur:
    name = "vidur"
    summary = "Vidur request traces (CSV num_prefill_tokens, num_decode_tokens, with or without arrived_at)"
    rules = Rules("seconds")

    def recognises(self, head: bytes, name: str) -> bool:
        return set(_NEEDED) <= set(csv_header(head))

    def read(self, source: Source, notes: Notes, asked: Asked) -> Iterator[Record]:
        rows = csv_rows(source, _NEEDED, _OPTIONAL, drop_repeated=asked.drop_duplicates)
        for prefill, decode, arrived, total in rows:
            n_in, n_out = whole(source, _NEEDED[0], prefill), whole(source, _NEEDED[1], decode)
            if total and whole(source, "num_total_tokens", total) != n_in + n_out:
                text = "num_total_tokens is not the sum of the two; prefill and decode are taken as they are"
                notes.warn("total_differs", source.name, source.line, text)
            if not arrived:
                text = "no arrivals: all requests stand at time 0, in the order of the file"
                notes.warn("no_times", source.name, source.line, text)
            yield Request(
                line=source.line,
                at_ns=duration_ns(source, "arrived_at", arrived, SECOND) if arrived else 0,
                input_tokens=n_in,
                output_tokens=n_out,
            )


VIDUR = Vidur()
