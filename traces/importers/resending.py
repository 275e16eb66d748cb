"""Rows that are made a second time, of the same input: those that the log has are compared and left out."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from kvtape.traces.errors import SequenceConflict
from kvtape.traces.schema import EVENTS, SESSIONS, quoted
from kvtape.traces.writer import LogWriter

__all__ = ["Resent"]

_COLUMNS = ", ".join(quoted(name) for name in EVENTS.columns)


class Resent:
    """What a log has of one run. `events`: how many were left out.

    Input makes its rows in one order, so all that the log has comes again before anything new.
    """

    def __init__(self, writer: LogWriter, run_id: str) -> None:
        self._writer = writer
        self.events = 0
        rows = writer.connection.execute(
            "SELECT session_id, max(seq) FROM events WHERE run_id = ? GROUP BY session_id", [run_id]
        ).fetchall()
        self._last: dict[str, int] = dict(rows)
        self._behind = set(self._last)

    @property
    def complete(self) -> bool:
        """Whether all that the log has came again."""
        return not self._behind

    def left(self, tables: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
        """The rows that are new, without empty tables. Raises SequenceConflict where one is not what the log has."""
        if not self._behind:
            return dict(tables)
        if EVENTS.name in tables:
            self._advance(tables[EVENTS.name])
        found: dict[str, pa.Table] = {}
        for name, rows in tables.items():
            there = self._there(name, rows)
            if name == EVENTS.name and any(there):
                self._compare(rows.filter(pa.array(there)))
                self.events += sum(there)
            fresh = rows.filter(pa.array([not old for old in there]))
            if fresh.num_rows:
                found[name] = fresh
        if found and self._behind:
            raise self._conflict(min(self._behind), self._last[min(self._behind)], "did not come again")
        return found

    def _there(self, name: str, rows: pa.Table) -> list[bool]:
        sessions = rows.column("session_id").to_pylist()
        if name == SESSIONS.name:
            return [session in self._last for session in sessions]
        numbers = rows.column("seq").to_pylist()
        return [seq <= self._last.get(s, -1) for s, seq in zip(sessions, numbers, strict=True)]

    def _advance(self, rows: pa.Table) -> None:
        pairs = zip(rows.column("session_id").to_pylist(), rows.column("seq").to_pylist(), strict=True)
        self._behind -= {s for s, seq in pairs if seq >= self._last.get(s, 0)}

    def _compare(self, rows: pa.Table) -> None:
        connection = self._writer.connection
        connection.register("again", rows)
        try:
            other = connection.execute(
                f"SELECT session_id, seq FROM (SELECT {_COLUMNS} FROM again EXCEPT SELECT {_COLUMNS} FROM events) "
                "ORDER BY ALL LIMIT 1"
            ).fetchall()
        finally:
            connection.unregister("again")
        if other:
            session, seq = other[0]
            raise self._conflict(session, seq, "came again with other content")

    def _conflict(self, session: str, seq: int, what: str) -> SequenceConflict:
        return SequenceConflict(
            f"{self._writer.path}: session {session} seq {seq} {what}; the input is not what the log was made of: "
            "follow it into a new log"
        )
