"""Dynamo request traces, schema `dynamo.request.trace.v1`: JSON lines written when a request ENDS.

Requests are put in the order in which they were received (unix ms). Each row states its own block size. Rows of tools
say nothing of a request and are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvtape.traces.importers.jsonl import refuse_repeated_keys
from kvtape.traces.importers.members import Members
from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import U64_MAX, Asked, Record, Request, Rules
from kvtape.traces.importers.sniffing import first_object
from kvtape.traces.importers.source import Source
from kvtape.traces.importers.usage import check_reused
from kvtape.traces.importers.values import MS

__all__ = ["DYNAMO", "Dynamo"]

_SCHEMA = "dynamo.request.trace.v1"


class Dynamo:
    name = "dynamo"
    summary = "Dynamo request traces (JSON lines of schema dynamo.request.trace.v1)"
    rules = Rules("unix milliseconds", block_rule="ceil", id_scope="global")

    def recognises(self, head: bytes, name: str) -> bool:
        return str(first_object(head).get("schema", "")).startswith("dynamo.request.trace.")

    def read(self, source: Source, notes: Notes, asked: Asked) -> Iterator[Record]:
        for line in source.lines(drop_repeated=asked.drop_duplicates):
            row = Members(source, refuse_repeated_keys(source, line, decimals=True))
            if row.get("schema") != _SCHEMA:
                raise source.rejected("schema", f"{row.get('schema')!r}", f"kvtape reads {_SCHEMA}")
            if row.get("event_type") != "request_end":
                text = "rows of other events than request_end were left out"
                notes.warn("other_events", source.name, source.line, text)
                continue
            yield self._request(source, notes, row, asked)

    def _request(self, source: Source, notes: Notes, row: Members, asked: Asked) -> Request:
        request = row.child("request")
        replay = request.child("replay") if "replay" in request else None
        n = request.whole_or_none("input_tokens")
        if n is None and replay is not None:
            n = replay.whole_or_none("input_length")
        if n is None:
            raise source.rejected("request.input_tokens", "is missing", "a request has input_tokens or replay")
        hashes, size = None, None
        if replay is not None and "input_sequence_hashes" in replay:
            hashes = replay.wholes("input_sequence_hashes", U64_MAX)
            size = asked.block_tokens or replay.whole("trace_block_size")
            if not size:
                raise source.rejected("request.replay.trace_block_size", "0 tokens", "a block has at least one token")
            if len(hashes) != -(-n // size):
                text = "another number of hashes than blocks of the prompt; kept as they are"
                notes.warn("block_count", source.name, source.line, text)
        reused = request.whole_or_none("cached_tokens")
        check_reused(source, "request.cached_tokens", reused, n)
        context = row.child("agent_context") if "agent_context" in row else None
        said: dict[str, Any] = {"request_id": request.text_or_none("request_id")}
        return Request(
            line=source.line,
            at_ns=request.ns("request_received_ms", MS),
            session=None if context is None else context.text_or_none("session_id"),
            input_tokens=n,
            output_tokens=request.whole_or_none("output_tokens"),
            hashes=hashes,
            block_tokens=size,
            reused=reused,
            first_token_ns=request.ns_or_none("ttft_ms", MS),
            elapsed_ns=request.ns_or_none("total_time_ms", MS),
            model=request.text_or_none("model"),
            detail={k: v for k, v in said.items() if v is not None},
        )


DYNAMO = Dynamo()
