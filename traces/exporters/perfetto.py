"""A log as a trace that Perfetto and chrome://tracing open: a track for each session.

slices     operations with their time (an instant where none was measured), the event's columns as arguments
counters   resident and cold tokens of each session
flows      from a plan to each evict that carried it out
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvtape.planner.events import Op
from kvtape.traces.reader import Log
from kvtape.traces.schema import quoted_text

__all__ = ["trace_lines"]

_ARGUMENTS = ("seq", "turn", "start", "stop", "n_tokens", "way", "reason", "reused", "prefilled", "resident_tokens")
_COLUMNS = (*_ARGUMENTS, "op", "at_ns", "elapsed_ns")


def trace_lines(log: Log, run_id: str) -> Iterator[bytes]:
    """JSON of the trace, event by event. Times in microseconds from the run's beginning."""
    yield b'{"displayTimeUnit":"ms","traceEvents":[\n'
    first = True
    for event in _trace_events(log, run_id):
        yield (b"" if first else b",\n") + msgspec.json.encode(event)
        first = False
    yield b"\n]}\n"


def _trace_events(log: Log, run_id: str) -> Iterator[dict[str, Any]]:
    pid, tid, session, plan = 1, 0, None, None
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"kvtape run {run_id}"}}
    for row in _rows(log, run_id):
        if row["session_id"] != session:
            session, plan, tid = row["session_id"], None, tid + 1
            name = f"{session} ({row['backend']})"
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        track = {"pid": pid, "tid": tid}
        yield from _slice(row, track)
        plan = row if row["op"] == Op.PLAN else plan
        if row["op"] == Op.EVICT and plan is not None and (row["reason"] or "").startswith("plan"):
            yield from _flow(plan, row, track, f"{tid}.{row['seq']}")
        if row["resident_tokens"] is not None:
            tokens = {"resident": row["resident_tokens"], "cold": row["cold_tokens"]}
            yield {"ph": "C", "name": f"tokens {session}", "pid": pid, "ts": _end(row), "args": tokens}


def _rows(log: Log, run_id: str) -> Iterator[dict[str, Any]]:
    """Events with their session's backend and the cold tokens after them, session by session."""
    columns = ", ".join(f'e."{name}"' for name in _COLUMNS)
    names, rows = log.sql(
        f"""SELECT e.session_id, s.backend, r.cold_tokens, {columns} FROM events e
            JOIN sessions s USING (run_id, session_id) JOIN residency r USING (run_id, session_id, seq)
            WHERE e.run_id = {quoted_text(run_id)} ORDER BY e.session_id, e.seq"""
    )
    for row in rows:
        yield dict(zip(names, row, strict=True))


def _slice(row: Mapping[str, Any], track: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    arguments = {k: row[k] for k in _ARGUMENTS if row[k] is not None}
    head = {"name": str(row["op"]), "cat": "kvtape", **track, "ts": row["at_ns"] / 1000, "args": arguments}
    if row["elapsed_ns"] is None:
        yield {"ph": "i", "s": "t", **head}
    else:
        yield {"ph": "X", "dur": row["elapsed_ns"] / 1000, **head}


def _flow(
    plan: Mapping[str, Any], act: Mapping[str, Any], track: Mapping[str, int], number: str
) -> Iterator[dict[str, Any]]:
    head = {"name": "plan", "cat": "kvtape", "id": number, **track}
    yield {"ph": "s", **head, "ts": plan["at_ns"] / 1000}
    yield {"ph": "f", "bp": "e", **head, "ts": act["at_ns"] / 1000}


def _end(row: Mapping[str, Any]) -> float:
    return float((row["at_ns"] + (row["elapsed_ns"] or 0)) / 1000)
