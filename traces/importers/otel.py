"""OpenTelemetry GenAI spans as JSON: OTLP exports (whole or by line), or one flat span a line.

    gen_ai.conversation.id                     session
    gen_ai.usage.input_tokens                  prompt, cached tokens included
    gen_ai.usage.cache_read.input_tokens       reused

Spans without `gen_ai.usage.input_tokens` are no model calls and are counted. A span that repeats the counts of the one
before it in its conversation is the same usage said again: counted once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvtape.traces.importers.jsonl import refuse_repeated_keys
from kvtape.traces.importers.members import Members
from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import Asked, Record, Request, Rules
from kvtape.traces.importers.sniffing import first_line
from kvtape.traces.importers.source import Source
from kvtape.traces.importers.stamps import WallClock
from kvtape.traces.importers.usage import Counts, check_reused, folded
from kvtape.traces.importers.values import SECOND, whole

__all__ = ["OTEL", "Otel"]

_USAGE = "gen_ai.usage."
_KEPT = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.response.id", "gen_ai.request.max_tokens")
_STARTS, _ENDS = ("startTimeUnixNano", "start_time"), ("endTimeUnixNano", "end_time")


class Otel:
    name = "otel"
    summary = "OpenTelemetry GenAI spans (OTLP JSON, or one span a line)"
    rules = Rules("unix nanoseconds or ISO 8601")

    def recognises(self, head: bytes, name: str) -> bool:
        spans = b'"resourceSpans"' in head or b'"attributes"' in first_line(head) or b'"startTimeUnixNano"' in head
        return head.lstrip()[:1] in (b"{", b"[") and spans and (b"gen_ai." in head or b'"resourceSpans"' in head)

    def read(self, source: Source, notes: Notes, asked: Asked) -> Iterator[Record]:
        yield from folded(self._requests(source, notes, asked), source, notes)

    def _requests(self, source: Source, notes: Notes, asked: Asked) -> Iterator[tuple[Request, Counts]]:
        clock = WallClock(source, notes)
        for span in _spans(source, asked):
            attributes = _attributes(source, span)
            if _USAGE + "input_tokens" not in attributes:
                text = "spans without gen_ai.usage.input_tokens were left out"
                notes.warn("other_spans", source.name, source.line, text)
                continue
            yield self._request(source, clock, span, attributes)

    def _request(self, source: Source, clock: WallClock, span: Members, attributes: Members) -> tuple[Request, Counts]:
        n = attributes.whole(_USAGE + "input_tokens")
        reused = attributes.whole_or_none(_USAGE + "cache_read.input_tokens")
        created = attributes.whole_or_none(_USAGE + "cache_creation.input_tokens")
        output = attributes.whole_or_none(_USAGE + "output_tokens")
        check_reused(source, attributes.at(_USAGE + "cache_read.input_tokens"), reused, n)
        began, ended = _time(source, clock, span, _STARTS), _time(source, clock, span, _ENDS)
        if began is None:
            raise source.rejected(span.at(_STARTS[0]), "is missing", "a span has its start")
        if ended is not None and ended < began:
            raise source.rejected(span.at(_ENDS[0]), "the span ends before it begins", "correct the span")
        reasons = attributes.get("gen_ai.response.finish_reasons")
        detail = {name: attributes.get(name) for name in _KEPT if name in attributes}
        if created is not None:
            detail["cache_creation_tokens"] = created
        request = Request(
            line=source.line,
            at_ns=began,
            session=attributes.text_or_none("gen_ai.conversation.id"),
            input_tokens=n,
            output_tokens=output,
            reused=reused,
            first_token_ns=attributes.ns_or_none("gen_ai.response.time_to_first_chunk", SECOND),
            elapsed_ns=None if ended is None else ended - began,
            stop=str(reasons[0]) if isinstance(reasons, list) and reasons else None,
            model=attributes.text_or_none("gen_ai.response.model") or attributes.text_or_none("gen_ai.request.model"),
            detail=detail,
        )
        return request, (n, reused, created, output)


def _spans(source: Source, asked: Asked) -> Iterator[Members]:
    """Spans of an export over many lines, or of each line."""
    if source.head.lstrip()[:2] in (b"{\n", b"{\r", b"[\n", b"[\r") or source.head.strip() in (b"{", b"["):
        values = [refuse_repeated_keys(source, source.read(), decimals=True)]
    else:
        lines = source.lines(drop_repeated=asked.drop_duplicates)
        values = (refuse_repeated_keys(source, line, decimals=True) for line in lines)  # type: ignore[assignment]
    for value in values:
        for entry in value if isinstance(value, list) else [value]:
            yield from _of(Members(source, entry))


def _of(value: Members) -> Iterator[Members]:
    if "resourceSpans" in value:
        for resource in value.children("resourceSpans"):
            for scope in resource.children("scopeSpans"):
                yield from scope.children("spans")
    else:
        yield value


def _attributes(source: Source, span: Members) -> Members:
    """Attributes by name, from the map form or from OTLP's list of typed values."""
    found = span.get("attributes")
    if isinstance(found, dict):
        return Members(source, found, span.at("attributes"))
    values: dict[str, Any] = {}
    for entry in span.children("attributes"):
        name = str(entry.get("key"))
        if name in values:
            raise source.rejected(entry.at("key"), f"{name} is there twice", "leave one of them")
        values[name] = _value(source, entry, name)
    return Members(source, values, span.at("attributes"))


def _value(source: Source, entry: Members, name: str) -> Any:
    value = entry.child("value")
    if "intValue" in value:  # OTLP JSON writes 64-bit integers as text
        found = value.get("intValue")
        return found if type(found) is int else whole(source, f"{entry.at('value')} ({name})", str(found))
    if "arrayValue" in value:
        listed = value.child("arrayValue").children("values")
        return [next((v.get(k) for k in ("stringValue", "intValue") if k in v), None) for v in listed]
    return next((value.get(k) for k in ("stringValue", "doubleValue", "boolValue") if value.get(k) is not None), None)


def _time(source: Source, clock: WallClock, span: Members, names: tuple[str, str]) -> int | None:
    """Unix nanoseconds as a number or text, or ISO 8601."""
    for name in names:
        found = span.get(name)
        if found is None:
            continue
        if type(found) is int or (isinstance(found, str) and found.isdigit()):
            return whole(source, span.at(name), str(found))
        return clock.unix_ns(span.at(name), str(found))
    return None


OTEL = Otel()
