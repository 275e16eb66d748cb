"""Weka kv-cache-tester traces: one JSON file a conversation, sub-agents inside.

Seconds from the session's start; a sub-agent's times count from its marker, and it is a session of its own. Blocks
of 64 tokens, and a partial last block is not listed. Ids mean something only inside one file, so they are hashed with
its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from kvtape.traces.importers.jsonl import refuse_repeated_keys
from kvtape.traces.importers.members import Members
from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import U64_MAX, Asked, Record, Request, Rules
from kvtape.traces.importers.source import Source
from kvtape.traces.importers.values import SECOND, check_block_count

__all__ = ["WEKA", "Weka"]

_SAID = ("type", "think_time", "input_types", "output_types")


class Weka:
    name = "weka"
    summary = "Weka kv-cache-tester traces (one JSON file a conversation, sub-agents inside)"
    rules = Rules("seconds", 64, "floor", "file")

    def recognises(self, head: bytes, name: str) -> bool:
        return head.lstrip()[:1] == b"{" and b'"hash_id_scope"' in head and b'"block_size"' in head

    def read(self, source: Source, notes: Notes, asked: Asked) -> Iterator[Record]:
        trace = Members(source, refuse_repeated_keys(source, source.read(), decimals=True))
        size = asked.block_tokens or trace.whole_or_none("block_size") or 64
        name = trace.text_or_none("id") or source.stem
        scope = name if trace.get("hash_id_scope") == "local" else None
        yield from _requests(source, notes, trace, name, 0, size, scope, iter(range(1, 2**62)))


def _requests(
    source: Source,
    notes: Notes,
    trace: Members,
    session: str,
    zero_ns: int,
    size: int,
    scope: str | None,
    numbers: Iterator[int],
) -> Iterator[Request]:
    """The requests of a conversation and of its sub-agents; `numbers` counts them over the whole file."""
    for entry in trace.children("requests"):
        at_ns = zero_ns + entry.ns("t", SECOND)
        if entry.get("type") == "subagent":
            agent = f"{session}/{entry.text_or_none('agent_id') or 'agent'}"
            yield from _requests(source, notes, entry, agent, at_ns, size, scope, numbers)
            continue
        ids = entry.wholes("hash_ids", U64_MAX)
        n = entry.whole("in")
        check_block_count(source, entry.at("hash_ids"), len(ids), n, size, "floor")
        if entry.whole_or_none("out") == 0:
            notes.warn("zero_output", source.name, None, "no output tokens; kept")
        detail = {name: entry.get(name) for name in _SAID if name in entry}
        if "think_time" in detail:
            detail["think_time"] = float(detail["think_time"])
        yield Request(
            line=next(numbers),
            at_ns=at_ns,
            session=session,
            input_tokens=n,
            output_tokens=entry.whole_or_none("out"),
            hashes=ids if scope is None else [_scoped(scope, i) for i in ids],
            block_tokens=size,
            first_token_ns=entry.ns_or_none("ttft", SECOND),
            elapsed_ns=entry.ns_or_none("api_time", SECOND),
            stop=entry.text_or_none("stop"),
            model=entry.text_or_none("model"),
            detail=detail,
        )


def _scoped(scope: str, number: int) -> int:
    raw = number.to_bytes(8, "little") + scope.encode()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8, person=b"kvtape scope").digest())


WEKA = Weka()
