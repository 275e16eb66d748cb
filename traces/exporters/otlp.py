"""A log as OpenTelemetry spans: OTLP/JSON lines, one line a session, in the GenAI conventions where they have a name.

    trace            the session; its root span from the first event to the last
    span of a turn   gen_ai.*: what was asked, what was cached, what came of it
      prefill, recompute, decode     children, one an operation (of the session where there is no turn)
      evict, admit, shift, fatal ..  span events

There is no content in it, nor an error's message. Ids come from the run's row, the session and the turn: exported twice
it is the same trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from kvtape.planner.events import Op
from kvtape.planner.rows import RunRow
from kvtape.traces.errors import TraceError
from kvtape.traces.exporters.otlp_turns import events_of, turn_attributes
from kvtape.traces.exporters.otlp_values import attributes, identity
from kvtape.traces.reader import Log
from kvtape.traces.schema import quoted_text

__all__ = ["count_spans", "span_lines"]

Row = Mapping[str, Any]

_INTERNAL, _ERROR = 1, 2
"""SpanKind and StatusCode of the protocol: the model runs in the process that is told of."""

_SPANS = (Op.PREFILL, Op.RECOMPUTE, Op.DECODE)
_EVENT = ("seq", "at_ns", "op", "turn", "start", "stop", "n_tokens", "way", "elapsed_ns", "resident_tokens", "cold")
_TURN = ("reused", "forgotten", "prompt_tokens", "completion_tokens", "reason", "error_class", "detail")
_SESSION = ("backend", "engine_version", "model_name", "model_fingerprint", "policy", "n_ctx")


def span_lines(log: Log, run_id: str | None, begin_ns: int | None = None) -> Iterator[bytes]:
    """TracesData, a line for each session in the order of runs and names.

    `run_id` None: every live run and import. `begin_ns`: when the first event was, in nanoseconds since 1970; by
    default the log's own times count. Raises TraceError for a run without events.
    """
    runs = [r for r in log.runs() if (r.kind in ("live", "import") if run_id is None else r.run_id == run_id)]
    first = {run.run_id: at for run in runs if (at := _first_ns(log, run)) is not None}
    if not first:
        what = "no live run and no import has an event" if run_id is None else f"run {run_id} has no event"
        raise TraceError(f"{log.path}: {what}, so there is no span to write")
    shift = 0 if begin_ns is None else begin_ns - min(first.values())
    for run in runs:
        chats = _chats(log, run.run_id)
        for session_id, found in groupby(_rows(log, run.run_id), key=lambda row: row["session_id"]):
            session = _Session(run, list(found), _zero_ns(run) + shift, chat=session_id in chats)
            yield msgspec.json.encode({"resourceSpans": [session.resource_spans()]}) + b"\n"


def count_spans(line: bytes) -> int:
    return line.count(b'"spanId":')


def _zero_ns(run: RunRow) -> int:
    """What makes `at_ns` a time on the run's own clock: an import counts from its first row."""
    return run.started_at_ns if run.kind == "import" else 0


def _first_ns(log: Log, run: RunRow) -> int | None:
    found = log.sql(f"SELECT min(at_ns) FROM events WHERE run_id = {quoted_text(run.run_id)}")[1][0][0]
    return None if found is None else _zero_ns(run) + int(found)


def _rows(log: Log, run_id: str) -> list[Row]:
    columns = ", ".join(f'e."{name}"' for name in (*_EVENT, *_TURN)) + ", " + ", ".join(f's."{n}"' for n in _SESSION)
    names, rows = log.sql(
        f"""SELECT e.session_id, {columns} FROM events e JOIN sessions s USING (run_id, session_id)
            WHERE e.run_id = {quoted_text(run_id)} ORDER BY e.session_id, e.seq"""
    )
    return [dict(zip(names, row, strict=True)) for row in rows]


def _chats(log: Log, run_id: str) -> set[str]:
    """Sessions whose prompts were made of messages; a text alone is a segment of the user's too."""
    query = f"""SELECT DISTINCT session_id FROM blocks WHERE run_id = {quoted_text(run_id)}
        AND segment IN ('system', 'tools', 'assistant', 'tool', 'assistant_prompt')"""
    return {row[0] for row in log.sql(query)[1]}


class _Session:
    """One session's spans. `shift` is added to its times."""

    def __init__(self, run: RunRow, rows: list[Row], shift: int, *, chat: bool) -> None:
        self._run, self._rows, self._shift, self._chat = run, rows, shift, chat
        self._head = rows[0]
        told = (run.run_id, str(run.started_at_ns), run.config_digest, self._head["session_id"])
        self._trace = identity(16, *told)
        self._root = self._id("session")

    def _id(self, *parts: object) -> str:
        return identity(8, self._trace, *map(str, parts))

    def resource_spans(self) -> dict[str, Any]:
        head = self._head
        resource = {
            "service.name": "kvtape",
            "service.version": self._run.kvtape_version,
            "kvtape.run.id": self._run.run_id,
            "kvtape.run.kind": self._run.kind,
            "kvtape.engine": head["backend"],
            "kvtape.engine.version": head["engine_version"],
            "kvtape.model": head["model_name"],
            "kvtape.model.fingerprint": head["model_fingerprint"],
        }
        scope = {"scope": {"name": "kvtape"}, "spans": list(self._spans())}
        return {"resource": {"attributes": attributes(resource)}, "scopeSpans": [scope]}

    def _spans(self) -> Iterator[dict[str, Any]]:
        head = self._head
        told = {"gen_ai.conversation.id": head["session_id"], "kvtape.policy": head["policy"]}
        told |= {"kvtape.n_ctx": head["n_ctx"]}
        outside = [row for row in self._rows if not row["turn"]]
        yield self._span(self._root, None, f"session {head['session_id']}", self._rows, told, outside)
        yield from self._operations(outside, self._root)
        for turn, found in groupby(self._rows[len(outside) :], key=lambda row: row["turn"]):
            yield from self._turn(turn, list(found))

    def _turn(self, turn: int, rows: list[Row]) -> Iterator[dict[str, Any]]:
        own = self._id("turn", turn)
        told = turn_attributes(turn, rows, self._head, chat=self._chat, imported=self._run.kind == "import")
        name = " ".join(str(told[key]) for key in ("gen_ai.operation.name", "gen_ai.request.model") if told.get(key))
        yield self._span(own, self._root, name, [r for r in rows if r["op"] != Op.CLOSE] or rows, told, rows)
        yield from self._operations(rows, own)

    def _operations(self, rows: Sequence[Row], parent: str) -> Iterator[dict[str, Any]]:
        for row in rows:
            if row["op"] in _SPANS:
                told = {"kvtape.seq": row["seq"], "kvtape.start": row["start"], "kvtape.stop": row["stop"]}
                told |= {"kvtape.tokens": row["n_tokens"], "kvtape.resident_tokens": row["resident_tokens"]}
                yield self._span(self._id("event", row["seq"]), parent, str(row["op"]), [row], told, [])

    def _span(
        self, own: str, parent: str | None, name: str, rows: list[Row], told: Mapping[str, Any], events: Sequence[Row]
    ) -> dict[str, Any]:
        """A span over `rows`, with the effects among `events` as span events; an error where one of `rows` is fatal."""
        span: dict[str, Any] = {"traceId": self._trace, "spanId": own}
        if parent is not None:
            span["parentSpanId"] = parent
        fatal = next((row for row in rows if row["op"] == Op.FATAL), None)
        told = dict(told) if fatal is None else {**told, "error.type": fatal["error_class"]}
        span |= {
            "name": name,
            "kind": _INTERNAL,
            "startTimeUnixNano": str(self._shift + min(row["at_ns"] for row in rows)),
            "endTimeUnixNano": str(self._shift + max(row["at_ns"] + (row["elapsed_ns"] or 0) for row in rows)),
            "attributes": attributes(told),
        }
        if found := list(events_of(events, self._shift)):
            span["events"] = found
        if fatal is not None:
            span["status"] = {"code": _ERROR, "message": str(fatal["error_class"])}
        return span
