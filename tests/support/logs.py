"""Rows, clocks and small logs for tests of the log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from kvtape.planner.events import BlockRef, Event, Op
from kvtape.planner.fields import Field, Kind
from kvtape.planner.rows import CertificationRow, RunRow, SessionRow
from kvtape.traces.keys import key_path
from kvtape.traces.recorder import Recorder
from kvtape.traces.schema import ENUMS, EVENTS, Table
from kvtape.traces.tape import Tape
from support.scripted import Script

__all__ = [
    "KEY",
    "TickClock",
    "certification_row",
    "event",
    "hashes_of",
    "record_script",
    "rows_of",
    "run_row",
    "script",
    "session_row",
    "write_log",
]

KEY = bytes(range(32))


class TickClock:
    """One nanosecond a call."""

    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        self.ns += 1
        return self.ns


def run_row(run_id: str = "r0", **changes: Any) -> RunRow:
    row = RunRow(
        run_id=run_id,
        kind="live",
        config_digest="0" * 64,
        config="{}",
        kvtape_version="0.1.0",
        engine_versions="{}",
        started_at_ns=1,
    )
    return replace(row, **changes)


def session_row(session_id: str = "s0", run_id: str = "r0", *, content: bool = True, **changes: Any) -> SessionRow:
    row = SessionRow(
        run_id=run_id,
        session_id=session_id,
        backend="llama",
        engine_version="1",
        model_fingerprint="llama/0",
        model_name="tiny.gguf",
        policy="none",
        n_ctx_asked=256,
        n_ctx=256,
        chunk=64,
        kv_type_k="f16",
        kv_type_v="f16",
        flash_attention=False,
        threads=1,
        cold_budget_tokens=0,
        capabilities="{}",
        content=content,
    )
    return replace(row, **changes)


def certification_row(number: int = 0, **changes: Any) -> CertificationRow:
    row = CertificationRow(
        run_id="r0",
        certification=number,
        kind="gate",
        model="tiny.gguf",
        fingerprint="llama/0",
        engine="toy",
        engine_version="1",
        machine="m",
        day="2026-01-01",
        subject="speculation",
        settings="",
        verdict="fail",
    )
    return replace(row, **changes)


def event(seq: int, op: Op = Op.SCORE, session_id: str = "s0", run_id: str = "r0", **columns: Any) -> Event:
    base: dict[str, Any] = {"at_ns": seq, "turn": 0, "generation": 0}
    return Event(run_id=run_id, session_id=session_id, seq=seq, op=op, **(base | columns))


def hashes_of(tokens: Sequence[int]) -> list[int]:
    """What a recorder under `KEY` tells of a tape that has these tokens: a number for each block, a partial one too."""
    whole = event(0, Op.PREFILL, start=0, stop=len(tokens))
    return [int(h, 16) for h in Tape(KEY).follow(whole, tokens)]


def script(session_id: str = "s0", run_id: str = "r0") -> Script:
    """A legal session with every kind of residency change."""
    s = Script(session_id=session_id, run_id=run_id)
    s.prefill(list(range(40)))
    s.decode([7, 8, 9])
    (block,) = s.evict(4, 12, cold=True)
    s.evict(20, 24)
    s.snapshot()
    s.admit(block)
    s.decode([1, 2])
    s.truncate(30)
    s.prefill([5] * 40)
    s.refuse()
    s.restore(0)
    s.decode([3])
    s.close()
    return s


def record_script(recorder: Recorder, made: Script, *, content: bool = True, flush_every: int = 4) -> None:
    """Record a scripted session, flushing now and then so that it spans several batches."""
    recorder.open_session(session_row(made.session_id, made.run_id, content=content))
    for e in made.events:
        row = made.tokens.get(e.seq)
        recorder.record(e, tokens=None if row is None else row.tokens)
        if e.seq % flush_every == flush_every - 1:
            recorder.flush()
    recorder.flush()


def write_log(path: Path, scripts: Sequence[Script] = (), *, seal: bool = True, content: bool = True) -> Path:
    """A log of these sessions (default: `script()`), under `KEY`."""
    recorder = Recorder(path, run_row(), clock=TickClock(), key=KEY, max_latency_s=0)
    for made in scripts or (script(),):
        record_script(recorder, made, content=content)
    recorder.seal() if seal else recorder.close()
    key_path(path).write_bytes(KEY)  # as if it had been drawn for this log
    return path


_TEXT = st.text(max_size=12)
_U64 = st.integers(0, 2**64 - 1) | st.sampled_from([0, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1])

_VALUES: dict[Kind, st.SearchStrategy[Any]] = {
    "u64": _U64,
    "i64": st.integers(-(2**63), 2**63 - 1),
    "f64": st.floats(allow_nan=False, allow_infinity=False),
    "bool": st.booleans(),
    "text": _TEXT,
    "json": st.recursive(st.none() | _U64 | _TEXT, lambda s: st.lists(s, max_size=3), max_leaves=4).map(json.dumps),
    "tokens": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(tuple),
    "floats": st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=5).map(tuple),
}
_BLOCKS = st.lists(st.builds(BlockRef, _U64, _U64, _U64), max_size=3).map(tuple)


def rows_of(table: Table) -> st.SearchStrategy[Any]:
    """Arbitrary rows of a table: any value that a column can hold."""
    return st.builds(table.row, **{f.name: _column(table, f) for f in table.fields})


def _column(table: Table, field: Field) -> st.SearchStrategy[Any]:
    if field.kind in ENUMS:
        values: st.SearchStrategy[Any] = st.sampled_from(list(ENUMS[field.kind]))
    elif table is EVENTS and field.name == "blocks":
        values = _BLOCKS
    else:
        values = _VALUES[field.kind]
    return values | st.none() if field.nullable else values
