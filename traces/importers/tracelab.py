"""TraceLab: rounds of coding agents as JSON lines with cache counts, and its replay workloads as CSV.

In the JSON lines `prefix_tokens` is what the provider found in its cache. It can fall inside a session (part of the
prefix was lost). In the CSV `prefix_len` is what should be there already: an expectation, kept in `detail`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvtape.traces.importers.jsonl import json_objects
from kvtape.traces.importers.members import Members
from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import Asked, Record, Request, Rules
from kvtape.traces.importers.sniffing import first_object
from kvtape.traces.importers.source import Source
from kvtape.traces.importers.stamps import WallClock
from kvtape.traces.importers.table import csv_header, csv_rows
from kvtape.traces.importers.usage import Counts, check_reused, folded
from kvtape.traces.importers.values import MS, duration_ns, whole

__all__ = ["TRACELAB", "TRACELAB_REPLAY", "TraceLab", "TraceLabReplay"]

_KEPT = (
    "provider",
    "round_index",
    "newly_append_tokens",
    "claude_uncached_input_tokens",
    "claude_cache_creation_input_tokens",
    "claude_cache_read_input_tokens",
    "reasoning_output_tokens",
)


class TraceLab:
    name = "tracelab"
    summary = "TraceLab rounds of coding agents (JSON lines with prefix_tokens and timing_events)"
    rules = Rules("ISO 8601")

    def recognises(self, head: bytes, name: str) -> bool:
        return {"session_id", "round_index", "input_tokens_total", "prefix_tokens"} <= first_object(head).keys()

    def read(self, source: Source, notes: Notes, asked: Asked) -> Iterator[Record]:
        yield from folded(self._rounds(source, notes, asked), source, notes)

    def _rounds(self, source: Source, notes: Notes, asked: Asked) -> Iterator[tuple[Request, Counts]]:
        clock = WallClock(source, notes)
        last: dict[str, int] = {}
        for value in json_objects(source, drop_repeated=asked.drop_duplicates):
            row = Members(source, value)
            n, reused = row.whole("input_tokens_total"), row.whole_or_none("prefix_tokens")
            check_reused(source, "prefix_tokens", reused, n)
            stamps = [clock.unix_ns(e.at("timestamp"), str(e.get("timestamp"))) for e in row.children("timing_events")]
            if not stamps:
                raise source.rejected("timing_events", "no time in it", "a round has at least one timed event")
            session = row.text_or_none("session_id")
            if session is not None and reused is not None:
                if reused < last.get(session, 0):
                    text = "fewer cached tokens than in the round before: part of the prefix was lost"
                    notes.warn("prefix_lost", source.name, source.line, text)
                last[session] = reused
            request = Request(
                line=source.line,
                at_ns=min(stamps),
                session=session,
                input_tokens=n,
                output_tokens=row.whole_or_none("output_tokens"),
                reused=reused,
                elapsed_ns=max(stamps) - min(stamps) if len(stamps) > 1 else None,
                model=row.text_or_none("model"),
                detail={name: row.get(name) for name in _KEPT if name in row},
            )
            created = row.whole_or_none("claude_cache_creation_input_tokens")
            yield request, (n, reused, created, request.output_tokens)


class TraceLabReplay:
    name = "tracelab-replay"
    summary = "TraceLab replay workloads (CSV session_id, round_idx, prefix_len, input_len, output_len, ...)"
    rules = Rules("milliseconds")

    _NEEDED = ("session_id", "round_idx", "prefix_len", "input_len", "output_len", "tool_wait_after_ms")

    def recognises(self, head: bytes, name: str) -> bool:
        return set(self._NEEDED) <= set(csv_header(head))

    def read(self, source: Source, notes: Notes, asked: Asked) -> Iterator[Record]:
        next_ns: dict[str, int] = {}
        rows = csv_rows(source, self._NEEDED, ("arrival_time",), drop_repeated=asked.drop_duplicates)
        for session, number, prefix, new, out, wait, arrival in rows:
            expected = whole(source, "prefix_len", prefix)
            at_ns = next_ns.get(session)
            if at_ns is None:
                at_ns = duration_ns(source, "arrival_time", arrival, MS) if arrival else 0
                if not arrival:
                    notes.warn("no_times", source.name, source.line, "no arrivals: sessions begin at time 0")
            else:
                text = "a round follows the wait after the one before, whose own time is not told: earliest possible"
                notes.warn("arrival_floor", source.name, source.line, text)
            next_ns[session] = at_ns + duration_ns(source, "tool_wait_after_ms", wait, MS)
            detail: dict[str, Any] = {"round_idx": whole(source, "round_idx", number), "expected_prefix": expected}
            yield Request(
                line=source.line,
                at_ns=at_ns,
                session=session or None,
                input_tokens=expected + whole(source, "input_len", new),
                output_tokens=whole(source, "output_len", out),
                detail=detail,
            )


TRACELAB = TraceLab()
TRACELAB_REPLAY = TraceLabReplay()
