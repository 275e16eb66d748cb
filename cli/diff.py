"""`kvtape diff`: the first event in which two logs differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AsJson, SessionId, log_place

if TYPE_CHECKING:
    from kvtape.planner.events import Event
    from kvtape.traces.reader import Log

__all__ = ["diff"]

CONTEXT_EVENTS = 5


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A log.", show_default=False, parser=log_place)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another log.", show_default=False, parser=log_place)],
    session: SessionId = None,
    as_json: AsJson = False,
) -> int:
    """Find the first event in which two logs differ.

    Times and run names are left out. Exits 1 when the logs differ.
    """
    from kvtape.cli.logs import opened
    from kvtape.cli.output import Section, emit

    with opened(a) as left, opened(b) as right:
        found = _first_difference(left, right, session)
        digests = {
            "a": left.logical_digest(left.default_run().run_id),
            "b": right.logical_digest(right.default_run().run_id),
        }
    body = {"same": found is None, "first_difference": found, "logical_digests": digests}
    if found is None:
        sections = [Section("the same events in both logs", (), ())]
    else:
        where = f"session {found['session']}" + ("" if found["seq"] is None else f", event {found['seq']}")
        sections = [
            Section(f"first difference: {where}", ("field", "a", "b"), [tuple(row) for row in found["fields"]]),
            Section("before it, in both", ("seq", "op", "start", "stop", "resident"), found["context"]),
        ]
    emit("diff", body, sections, as_json=as_json)
    return 0 if found is None else 1


def _first_difference(left: Log, right: Log, session: str | None) -> dict[str, Any] | None:
    from kvtape.cli.logs import chosen_sessions

    a = {row.session_id: row for row in chosen_sessions(left, session)}
    b = {row.session_id: row for row in chosen_sessions(right, session)}
    for session_id in list(a) + [s for s in b if s not in a]:
        if session_id not in a or session_id not in b:
            fields = [["session", session_id in a, session_id in b]]
            return {"session": session_id, "seq": None, "fields": fields, "context": []}
        fields = _session_fields(a[session_id], b[session_id])
        if fields:
            return {"session": session_id, "seq": None, "fields": fields, "context": []}
        found = _first_event(
            session_id,
            left.events(left.default_run().run_id, session_id),
            right.events(right.default_run().run_id, session_id),
        )
        if found is not None:
            return found
    return None


def _session_fields(a: Any, b: Any) -> list[list[Any]]:
    from kvtape.planner.rows import SESSION_FIELDS

    names = [f.name for f in SESSION_FIELDS if f.logical]
    return [[n, getattr(a, n), getattr(b, n)] for n in names if getattr(a, n) != getattr(b, n)]


def _first_event(session_id: str, a: list[Event], b: list[Event]) -> dict[str, Any] | None:
    from kvtape.planner.events import EVENT_FIELDS

    names = [f.name for f in EVENT_FIELDS if f.logical]
    for i in range(max(len(a), len(b))):
        left = _logical(a[i], names) if i < len(a) else None
        right = _logical(b[i], names) if i < len(b) else None
        if left == right:
            continue
        fields: list[list[Any]] = []
        if left is None or right is None:
            fields.append(["op", None if left is None else left["op"], None if right is None else right["op"]])
        else:
            fields = [[n, left[n], right[n]] for n in names if left[n] != right[n]]
        before = [[e.seq, str(e.op), e.start, e.stop, e.resident_tokens] for e in a[max(0, i - CONTEXT_EVENTS) : i]]
        seq = min(events[i].seq for events in (a, b) if i < len(events))  # not `i`: a lost event stands for several
        return {"session": session_id, "seq": seq, "a": left, "b": right, "fields": fields, "context": before}
    return None


def _logical(event: Event, names: list[str]) -> dict[str, Any]:
    values = {name: getattr(event, name) for name in names}
    if event.blocks is not None:
        values["blocks"] = [[ref.block_id, ref.start, ref.stop] for ref in event.blocks]
    return values
