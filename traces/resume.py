"""What a log already has, when a recorder goes on with it or an event comes a second time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.planner.events import Event, Op
from kvtape.planner.rows import RunRow, SessionRow, TokensRow
from kvtape.traces.batch import BatchBuilder
from kvtape.traces.errors import SequenceConflict
from kvtape.traces.lost import lost_events
from kvtape.traces.query import select_rows
from kvtape.traces.schema import EVENTS, RUNS, SESSIONS, TOKENS, Table, quoted
from kvtape.traces.tape import content_mac
from kvtape.traces.writer import LogWriter

__all__ = ["Recorded", "check_same_event", "holds_run", "last_number", "recorded_sessions"]


@dataclass(slots=True)
class Recorded:
    """A session as the log has it; `replayed`: the seq from which its tape is not known yet."""

    row: SessionRow
    next_seq: int
    turn: int
    generation: int
    replayed: int

    def replay(self, builder: BatchBuilder, event: Event, tokens: Sequence[int] | None) -> None:
        """Move the tape on over a resent event, so that the hashes of later events continue the chain."""
        if event.seq == self.replayed:
            builder.follow(event, tokens)
            self.replayed += 1


def holds_run(writer: LogWriter, run: RunRow) -> bool:
    """Whether the log has this run. Raises SequenceConflict when it has another one under the same id."""
    found = select_rows(writer.connection, RUNS, "run_id = ?", [run.run_id])
    if found and found[0] != run:
        raise SequenceConflict(f"{writer.path}: run {run.run_id} is there with another row; give the run a new id")
    return bool(found)


def last_number(writer: LogWriter, table: Table, run_id: str) -> int:
    """Number of the run's last row of `table`, which is ordered by run and number; -1 where there is none."""
    query = f"SELECT max({quoted(table.order[1])}) FROM {table.name} WHERE run_id = ?"
    found = writer.connection.execute(query, [run_id]).fetchall()
    return -1 if found[0][0] is None else int(found[0][0])


def recorded_sessions(writer: LogWriter, run_id: str, builder: BatchBuilder) -> list[Recorded]:
    """The sessions of a run, announced to `builder`; tapes are rebuilt where the log stores content."""
    found = []
    for row in select_rows(writer.connection, SESSIONS, "run_id = ?", [run_id]):
        builder.open_session(row)
        stored = Recorded(row, next_seq=0, turn=0, generation=0, replayed=0)
        where, params = "run_id = ? AND session_id = ?", [run_id, row.session_id]
        events: list[Event] = select_rows(writer.connection, EVENTS, where, params)
        if events:
            last = events[-1]
            stored.next_seq = last.seq + max(1, lost_events(last))
            stored.turn, stored.generation = last.turn, last.generation
        if row.content:
            tokens: list[TokensRow] = select_rows(writer.connection, TOKENS, where, params)
            by_seq = {t.seq: t.tokens for t in tokens}
            for event in events:
                builder.follow(event, by_seq.get(event.seq))
            stored.replayed = stored.next_seq
        found.append(stored)
    return found


def check_same_event(writer: LogWriter, event: Event, tokens: tuple[int, ...] | None) -> None:
    """Compare a resent event with the stored one. Raises SequenceConflict naming the first column that differs."""
    with writer.connection.cursor() as cursor:  # the writer's own connection may be busy
        where, params = "run_id = ? AND session_id = ? AND seq = ?", [event.run_id, event.session_id, event.seq]
        stored = select_rows(cursor, EVENTS, where, params)
        rows = select_rows(cursor, TOKENS, where, params)
    name = f"session {event.session_id} seq {event.seq}"
    if not stored:
        return  # one of the events that a `lost` event stands for
    old: Event = stored[0]
    if old.op == Op.LOST and event.op != Op.LOST:
        return
    for column in EVENTS.columns:
        was, now = getattr(old, column), getattr(event, column)
        if was != now:
            raise SequenceConflict(f"{name} came again with {column} {now!r}; the log has {was!r}")
    macs = [row.mac for row in rows]
    if macs != ([] if tokens is None or event.start is None else [content_mac(writer.key, event.start, tokens)]):
        raise SequenceConflict(f"{name} came again with other tokens")
