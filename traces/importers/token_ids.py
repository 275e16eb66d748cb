"""Traces that carry token ids: LLMServingSim workloads and Tair token-id traces. Ids are hashed under the log's key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvtape.traces.importers.jsonl import refuse_repeated_keys
from kvtape.traces.importers.members import Members
from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import Asked, Record, Request, Rules
from kvtape.traces.importers.sniffing import first_object
from kvtape.traces.importers.source import Source
from kvtape.traces.importers.stamps import WallClock
from kvtape.traces.importers.values import NS, SECOND

__all__ = ["LLMSERVINGSIM", "TAIR", "LlmServingSim", "Tair"]

_MOST = 2**31 - 1
_ZONE_NS = 60 * SECOND


class LlmServingSim:
    """Output ids often begin by repeating the prompt; they are kept as they are, and that is noted."""

    name = "llmservingsim"
    summary = "LLMServingSim workloads (JSON lines with input_tok_ids and output_tok_ids)"
    rules = Rules("nanoseconds", id_scope="global")

    def recognises(self, head: bytes, name: str) -> bool:
        return {"input_toks", "output_toks", "arrival_time_ns"} <= first_object(head).keys()

    def read(self, source: Source, notes: Notes, asked: Asked) -> Iterator[Record]:
        for row in _rows(source, asked):
            prompt = row.wholes("input_tok_ids", _MOST) if "input_tok_ids" in row else None
            output = row.wholes("output_tok_ids", _MOST) if "output_tok_ids" in row else None
            n_in, n_out = row.whole("input_toks"), row.whole("output_toks")
            for name, ids, n in (("input_tok_ids", prompt, n_in), ("output_tok_ids", output, n_out)):
                if ids is not None and len(ids) != n:
                    raise source.rejected(name, f"{len(ids)} ids, the row says {n}", "correct the row")
            detail: dict[str, Any] = {}
            if prompt and output and (shared := _shared(prompt, output)) > len(prompt) // 2:
                detail["repeats_prompt"] = shared
                text = "the output ids begin by repeating the prompt; kept as they are"
                notes.warn("output_repeats_prompt", source.name, source.line, text)
            yield Request(
                line=source.line,
                at_ns=row.ns("arrival_time_ns", NS),
                input_tokens=n_in,
                output_tokens=n_out,
                prompt_ids=prompt,
                output_ids=output,
                detail=detail,
            )


class Tair:
    """Stamps are seconds since 1970; the text beside them was written in another zone, so it does not count."""

    name = "tair"
    summary = "Tair KV-cache token-id traces (JSON lines with timestamp and token_ids)"
    rules = Rules("seconds since 1970", id_scope="global")

    def recognises(self, head: bytes, name: str) -> bool:
        return {"timestamp", "token_ids"} <= first_object(head).keys()

    def read(self, source: Source, notes: Notes, asked: Asked) -> Iterator[Record]:
        clock = WallClock(source, Notes())
        for row in _rows(source, asked):
            ids = row.wholes("token_ids", _MOST)
            at_ns = row.ns("timestamp", SECOND)
            said = row.text_or_none("ts_str")
            if said is not None and abs(clock.unix_ns("ts_str", said) - at_ns) > _ZONE_NS:
                text = "ts_str is another time than timestamp (another zone, it seems); timestamp counts"
                notes.warn("stamp_differs", source.name, source.line, text)
            yield Request(
                line=source.line,
                at_ns=at_ns,
                input_tokens=len(ids),
                prompt_ids=ids,
                detail={"is_tool_call": row.get("is_tool_call")} if "is_tool_call" in row else {},
            )


def _rows(source: Source, asked: Asked) -> Iterator[Members]:
    for line in source.lines(drop_repeated=asked.drop_duplicates):
        yield Members(source, refuse_repeated_keys(source, line, decimals=True))


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


LLMSERVINGSIM = LlmServingSim()
TAIR = Tair()
