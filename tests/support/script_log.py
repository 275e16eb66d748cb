"""Scripted sessions as a log in memory: what replay reads, without a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtape.planner.events import Event
from kvtape.planner.rows import RunRow, SessionRow, TokensRow
from support.logs import run_row, session_row
from support.scripted import Script

__all__ = ["ScriptLog"]


class ScriptLog:
    """`events` may be replaced by tampered ones; `columns` go into every session row."""

    def __init__(self, scripts: Sequence[Script], fingerprint: str, **columns: Any) -> None:
        f32 = {"kv_type_k": "f32", "kv_type_v": "f32", "cold_budget_tokens": 256}
        self._rows = [
            session_row(s.session_id, s.run_id, **{**f32, "model_fingerprint": fingerprint, **columns}) for s in scripts
        ]
        self._events = {s.session_id: list(s.events) for s in scripts}
        self._tokens = {s.session_id: dict(s.tokens) for s in scripts}

    def change(self, session_id: str, seq: int, **columns: Any) -> None:
        """Rewrite one recorded event."""
        events = self._events[session_id]
        events[seq] = replace(events[seq], **columns)

    def drop_content(self, session_id: str) -> None:
        tokens = self._tokens[session_id]
        self._tokens[session_id] = {seq: replace(row, tokens=None) for seq, row in tokens.items()}

    def default_run(self) -> RunRow:
        return run_row(self._rows[0].run_id if self._rows else "r0")

    def sessions(self, run_id: str) -> Sequence[SessionRow]:
        return [row for row in self._rows if row.run_id == run_id]

    def events(self, run_id: str, session_id: str) -> Sequence[Event]:
        return self._events[session_id]

    def tokens(self, run_id: str, session_id: str) -> Mapping[int, TokensRow]:
        return self._tokens[session_id]

    def logical_digest(self, run_id: str) -> str:
        return "0" * 64
