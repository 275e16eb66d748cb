"""Reading a log: typed rows, the folded state, SQL. Nothing here can change a log.

A sealed log is opened in place, read-only. One that is being recorded, or was left by a dead recorder, is copied
first (sidecar, file, write-ahead log), so that neither side disturbs the other; `Log.notice` says so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import duckdb
import pyarrow as pa

from kvtape.planner.event_columns import EventColumns
from kvtape.planner.events import Event
from kvtape.planner.fold_columns import fold_columns
from kvtape.planner.grammar import nearest
from kvtape.planner.residency import ResidencyState, check_event, fold
from kvtape.planner.rows import BlockRow, CertificationRow, PlanRow, RunRow, ScoreRow, SessionRow, TokensRow, TrialRow
from kvtape.traces.database import (
    check_file_kind,
    check_whole,
    damaged,
    one_line,
    open_read_only,
    read_meta,
    readable,
    wal_path,
)
from kvtape.traces.digest import logical_digest
from kvtape.traces.errors import LogLocked, LogMissing, LogUnreadable, NoSuchRow, SqlRejected
from kvtape.traces.live import drop_stale_wal, recorded_here, snapshot
from kvtape.traces.query import select_arrow, select_rows
from kvtape.traces.schema import (
    BLOCKS,
    CERTIFICATIONS,
    EVENTS,
    PLANS,
    RUNS,
    SCORES,
    SESSIONS,
    TABLES,
    TOKENS,
    TRIALS,
    quoted,
)
from kvtape.traces.session_columns import session_columns
from kvtape.traces.sidecar import Head, head_path, read_head
from kvtape.traces.upcast import bring_up

__all__ = ["Log", "open_log"]

_SESSION = "run_id = ? AND session_id = ?"


class Log:
    """An open log. Use as a context manager, or `close` it: an open sealed log keeps writers out.

    `notice`: one line for people when this is a snapshot; None for a sealed log. `head`: what was acknowledged last;
    None when the sidecar is missing or damaged (`head_problem` says which). `source`: the file that is read, the log
    itself or the copy of it.
    """

    def __init__(self, path: Path, connection: duckdb.DuckDBPyConnection, meta: dict[str, str], source: Path) -> None:
        self.path = path
        self.source = source
        self.connection = connection
        self.meta = meta
        self.sealed = "sealed" in meta
        self.notice: str | None = None
        self.head: Head | None = None
        self.head_problem: str | None = None
        self._held = ExitStack()
        self._held.callback(connection.close)
        try:
            self.head = read_head(source, path)
        except ValueError as err:
            self.head_problem = str(err)
        if self.head is None and self.head_problem is None:
            self.head_problem = f"{head_path(path).name} is missing"

    @property
    def schema_version(self) -> int:
        return int(self.meta["schema_version"])

    @property
    def unacknowledged(self) -> int | None:
        """Events past the head: committed, but nobody was told so. None without a head."""
        if self.head is None:
            return None
        return int(self._query("SELECT count(*) FROM events WHERE batch > ?", [self.head.batch])[0][0])

    @property
    def chain_digest(self) -> str:
        """SHA-256 hex of the last batch: covers every byte of every row. `verify` recomputes it."""
        found = self._query("SELECT lower(hex(digest)) FROM batches ORDER BY batch DESC LIMIT 1")
        return str(found[0][0]) if found else ""

    def logical_digest(self, run_id: str | None = None) -> str:
        """Digest of what happened in a run, the same for every recording of it. Default: `default_run()`."""
        wanted = self._run(run_id)
        with readable(self.path):
            return logical_digest(self.connection, wanted)

    def runs(self) -> list[RunRow]:
        return self._rows(RUNS)

    def default_run(self) -> RunRow:
        """The last live run, else the last of any kind, in the order in which they were recorded."""
        rows = self.arrow("runs")
        order = sorted(zip(rows.column("batch").to_pylist(), self.runs(), strict=True), key=lambda pair: pair[0])
        if not order:
            raise NoSuchRow(f"{self.path}: the log holds no run")
        live = [run for _, run in order if run.kind == "live"]
        return live[-1] if live else order[-1][1]

    def sessions(self, run_id: str | None = None) -> list[SessionRow]:
        """Sessions of a run in the order of their first events; those without any come last."""
        wanted = self._run(run_id)
        first = dict(
            self._query("SELECT session_id, min(at_ns) FROM events WHERE run_id = ? GROUP BY session_id", [wanted])
        )
        found: list[SessionRow] = self._rows(SESSIONS, "run_id = ?", [wanted])
        return sorted(found, key=lambda s: (s.session_id not in first, first.get(s.session_id, 0), s.session_id))

    def session(self, run_id: str, session_id: str) -> SessionRow:
        """Raises NoSuchRow, listing the sessions that are there."""
        found = {s.session_id: s for s in self.sessions(run_id)}
        if session_id not in found:
            raise NoSuchRow(
                f"{self.path}: run {run_id} has no session {session_id!r}; it has {', '.join(found) or 'none'}"
            )
        return found[session_id]

    def events(self, run_id: str, session_id: str) -> list[Event]:
        """All events of a session by seq. Raises NoSuchRow for an unknown one."""
        found = self._rows(EVENTS, _SESSION, [run_id, session_id])
        if not found:
            self.session(run_id, session_id)
        return found

    def event(self, run_id: str, session_id: str, seq: int | None = None) -> Event:
        """One event of a session; default: its last. Raises NoSuchRow."""
        which = "seq = ?" if seq is not None else f"seq = (SELECT max(seq) FROM events WHERE {_SESSION})"
        params = [run_id, session_id] * (1 if seq is not None else 2) + ([] if seq is None else [seq])
        found = self._rows(EVENTS, f"{_SESSION} AND {which}", params)
        if not found:
            self.session(run_id, session_id)
            raise NoSuchRow(f"{self.path}: session {session_id} has no event {'at all' if seq is None else seq}")
        event: Event = found[0]
        return event

    def lost_at(self, run_id: str, session_id: str) -> int | None:
        """Seq of the first `lost` event of a session: the fold ends there. None where nothing was lost."""
        query = f"SELECT min(seq) FROM events WHERE {_SESSION} AND op = 'lost'"
        found: int | None = self._query(query, [run_id, session_id])[0][0]
        return found

    def totals(self, run_id: str, session_id: str, columns: Sequence[str], seq: int) -> dict[str, int]:
        """Sums of integer columns over the events of a session up to and with `seq`; 0 where none has a value."""
        sums = ", ".join(f"coalesce(sum({quoted(name)}), 0)::HUGEINT" for name in columns)
        query = f"SELECT {sums} FROM events WHERE {_SESSION} AND seq <= ?"
        return dict(zip(columns, self._query(query, [run_id, session_id, seq])[0], strict=True))

    def tokens(self, run_id: str, session_id: str) -> dict[int, TokensRow]:
        """By the seq of the event that brought them."""
        return {row.seq: row for row in self._rows(TOKENS, _SESSION, [run_id, session_id])}

    def blocks(self, run_id: str, session_id: str) -> list[BlockRow]:
        """By seq, then block id."""
        return self._rows(BLOCKS, _SESSION, [run_id, session_id])

    def plans(self, run_id: str, session_id: str) -> dict[int, PlanRow]:
        """By the seq of the plan event."""
        return {row.seq: row for row in self._rows(PLANS, _SESSION, [run_id, session_id])}

    def last_plan(self, run_id: str, session_id: str, seq: int) -> PlanRow | None:
        """The last plan made up to and with event `seq`."""
        where = f"{_SESSION} AND seq = (SELECT max(seq) FROM plans WHERE {_SESSION} AND seq <= ?)"
        found = self._rows(PLANS, where, [run_id, session_id, run_id, session_id, seq])
        return found[0] if found else None

    def scores(self, run_id: str, session_id: str) -> list[ScoreRow]:
        """By seq of the score event, then block id."""
        return self._rows(SCORES, _SESSION, [run_id, session_id])

    def trials(self, run_id: str | None = None) -> list[TrialRow]:
        """Results of an evaluation by number. Default: those of `default_run()`."""
        return self._rows(TRIALS, "run_id = ?", [self._run(run_id)])

    def certifications(self, run_id: str | None = None) -> list[CertificationRow]:
        """Rows of proofs by number. Default: those of `default_run()`."""
        return self._rows(CERTIFICATIONS, "run_id = ?", [self._run(run_id)])

    def state_at(self, run_id: str, session_id: str, seq: int | None = None) -> ResidencyState:
        """The state after event `seq` of the session (default: its last), folded as columns (`session_columns`).

        It is compared with what that event recorded. Where they differ or an event is illegal, the session is folded
        event by event, each compared with what it recorded, and the error names the first culprit.

        Raises NoSuchRow, planner.residency.IllegalEvent or ResidencyMismatch, LogUnreadable.
        """
        columns = self.columns(run_id, session_id, seq)
        if not len(columns):
            self.session(run_id, session_id)
        if seq is not None and not (len(columns) and columns.seq[-1] == seq):
            last = self._query(f"SELECT max(seq) FROM events WHERE {_SESSION}", [run_id, session_id])[0][0]
            raise NoSuchRow(
                f"{self.path}: session {session_id} has no event {seq}; its last is {'none' if last is None else last}"
            )
        try:
            state = fold_columns(columns)
            for event in self._rows(EVENTS, f"{_SESSION} AND seq = ?", [run_id, session_id, state.next_seq - 1]):
                check_event(state, event)
        except ValueError:  # IllegalEvent and ResidencyMismatch, or numbers that no column holds
            return fold(e for e in self.events(run_id, session_id) if seq is None or e.seq <= seq)
        return state

    def columns(self, run_id: str, session_id: str, seq: int | None = None) -> EventColumns:
        """A session's events as columns, up to and with event `seq` (default: all). Raises LogUnreadable."""

        def fetch(condition: str) -> list[Event]:
            return self._rows(EVENTS, f"{_SESSION} AND {condition}", [run_id, session_id])

        try:
            with readable(self.path):
                return session_columns(self.connection, run_id, session_id, seq, fetch)
        except ValueError as err:
            raise LogUnreadable(f"{self.path}: events holds what kvtape never writes ({err})") from None

    def sql(self, query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Column names and rows of a query over tables and views. 64-bit ids are exact.

        Raises SqlRejected for a query that is wrong, that would write, or that reaches for other files.
        """
        try:
            result = self.connection.execute(query)
            if result is None:
                raise SqlRejected(f"{self.path}: an empty query; write one like SELECT * FROM turns")
            columns = [str(d[0]) for d in result.description or ()]
            return columns, result.fetchall() if columns else []
        except (duckdb.IOException, duckdb.FatalException, duckdb.InternalException) as err:
            raise damaged(self.path, err) from None
        except duckdb.Error as err:
            if str(err).startswith("Corrupt database file"):  # a damaged block raises the bare base class
                raise damaged(self.path, err) from None
            raise SqlRejected(f"{self.path}: {one_line(err)}") from None

    def arrow(self, table: str, where: str = "true", params: Sequence[Any] = ()) -> pa.Table:
        """Rows of a table in canonical order, with their `batch`. KeyError for an unknown table."""
        with readable(self.path):
            return select_arrow(self.connection, TABLES[table], where, params)

    def _rows(self, table: Any, where: str = "true", params: Sequence[Any] = ()) -> list[Any]:
        try:
            with readable(self.path):
                return select_rows(self.connection, table, where, params)
        except ValueError as err:
            raise LogUnreadable(f"{self.path}: {table.name} holds what kvtape never writes ({err})") from None

    def _query(self, query: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with readable(self.path):
            return self.connection.execute(query, list(params)).fetchall()

    def _run(self, run_id: str | None) -> str:
        if run_id is None:
            return self.default_run().run_id
        known = [r.run_id for r in self.runs()]
        if run_id not in known:
            hint = nearest(run_id, known)
            raise NoSuchRow(f"{self.path}: no run {run_id!r}{hint} the log has {', '.join(known) or 'none'}")
        return run_id

    def close(self) -> None:
        """Idempotent. Removes the snapshot, if there is one."""
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_log(path: str | Path, *, torn: bool = False) -> Log:
    """Open a log for reading: a file, a log folder, or `parquet://` and folders of logs written out as Parquet.

    Raises LogMissing, NotALog, LogTooNew, LogUnreadable, SequenceConflict (parts that do not go together).

    A log whose acknowledged tail is lost is LogUnreadable as well: what is left is not what was recorded. `torn` opens
    what is left of it, for those who say what is lost; `notice` says so too.
    """
    from kvtape.traces import union  # it opens each part with this function

    if (where := union.parquet_place(path)) is not None:
        return union.open_parquet(where)
    if Path(path).is_dir():
        return union.open_folder(Path(path), torn=torn)
    log = _open(Path(path))
    lost = _lost_tail(log)
    if lost and not torn:
        log.close()
        raise LogUnreadable(
            f"{path}: {lost}; `kvtape verify` says what is gone, `kvtape repair {path} --out NEW` keeps the rest"
        )
    for more in (lost, _repaired(log)):
        if more:
            log.notice = f"{log.notice}; {more}" if log.notice else more
    return log


def _open(log: Path) -> Log:
    if not log.exists():
        raise LogMissing(f"{log}: no such log; give the path of a log file or a log folder")
    if not recorded_here(log):
        check_file_kind(log, log)
        if not wal_path(log).exists():
            try:
                return _open_in_place(log)
            except LogLocked:
                pass  # a recorder that has written nothing yet
    return _open_snapshot(log)


def _open_in_place(path: Path) -> Log:
    connection = open_read_only(path, path)
    try:
        check_whole(connection, path, path)
        return Log(path, connection, _todays(connection, path), path)
    except BaseException:
        connection.close()
        raise


def _todays(connection: duckdb.DuckDBPyConnection, path: Path) -> dict[str, str]:
    """The meta rows of an open log, whose tables are in the shape of today from now on."""
    meta = read_meta(connection, path)
    with readable(path):
        bring_up(connection, int(meta["schema_version"]))
    return meta


def _open_snapshot(path: Path) -> Log:
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="kvtape-")))
        copy = snapshot(path, folder)
        check_file_kind(copy, path)
        stale = drop_stale_wal(copy, path)
        connection = open_read_only(copy, path)
        held.callback(connection.close)
        check_whole(connection, copy, path)
        log = Log(path, connection, _todays(connection, path), copy)
        if not log.sealed:
            log.notice = _notice(log)
        elif stale:
            log.notice = (
                f"{wal_path(path).name} was left by a crash while the log was sealed and is no part of it; remove it, "
                f"other DuckDB clients refuse the log beside it"
            )
        log._held.push(held.pop_all())
        return log
    raise AssertionError("unreachable")


def _lost_tail(log: Log) -> str | None:
    if log.head is None:
        return None
    try:
        stored = int(log._query("SELECT coalesce(max(batch), 0) FROM batches")[0][0])
    except LogUnreadable:
        log.close()
        raise
    if log.head.batch <= stored:
        return None
    lost = f"batches {stored + 1} to {log.head.batch}"
    return f"the acknowledged tail of {log.path.name} is lost ({lost})"


def _repaired(log: Log) -> str | None:
    text = log.meta.get("repaired")
    return None if text is None else f"{log.path.name} was repaired: {text}"


def _notice(log: Log) -> str:
    extra = log.unacknowledged
    text = f"{log.path.name} is not sealed (being recorded, or left by a recorder that died): read from a snapshot"
    return f"{text}; {extra} events past the acknowledged head" if extra else text
