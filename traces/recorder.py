"""Recording: a session hands events over, a background thread makes them durable.

    caller      record(event): check its seq, put it on a bounded queue                        microseconds
    writer      take what waits, `batch_events` a batch -> Arrow -> one transaction -> sidecar  then acknowledge

A batch leaves when it is full, when `max_latency_s` has passed since its first event, or on flush and close. Where
several wait they share a transaction (`group`), and flush returns after the one that has its events.
"""

from __future__ import annotations

import atexit
import math
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

import duckdb

from kvtape.planner.events import Event, Op
from kvtape.planner.rows import BlockRow, CertificationRow, PlanRow, RunRow, ScoreRow, SessionRow, TrialRow
from kvtape.traces.batch import BatchBuilder, Item
from kvtape.traces.errors import (
    LogUnreadable,
    LogWriteFailed,
    RecorderClosed,
    SequenceConflict,
    SequenceError,
    SequenceGap,
)
from kvtape.traces.folder import new_segment
from kvtape.traces.lost import lost_detail
from kvtape.traces.resume import Recorded, check_same_event, holds_run, last_number, recorded_sessions
from kvtape.traces.schema import CERTIFICATIONS, TRIALS
from kvtape.traces.seal import seal_log
from kvtape.traces.spill import limit_memory, unlimited_memory
from kvtape.traces.tape import TOKEN_OPS
from kvtape.traces.writer import LogWriter

__all__ = ["LOST_REASON", "Clock", "Recorder"]

LOST_REASON = "queue_full"
"""`reason` of a `lost` event."""

_GROUP = 16
"""Batches in one transaction at most: beyond, waiting for it costs more than it saves."""


class Clock(Protocol):
    def now_ns(self) -> int: ...


class _Mark:
    """Where a session stands: the seq that must come next, and how many were dropped before it."""

    __slots__ = ("dropped", "generation", "next_seq", "row", "stored", "turn")

    def __init__(self, row: SessionRow, stored: Recorded | None = None) -> None:
        self.row = row
        self.stored = stored
        self.next_seq = stored.next_seq if stored else 0
        self.turn = stored.turn if stored else 0
        self.generation = stored.generation if stored else 0
        self.dropped = 0


class Recorder:
    """The recorder of one run. Thread-safe; the events of one session come from one thread.

    Args:
        path: the log. It must not exist, unless `resume`. In a log folder (or an empty one) a segment is made.
        run: the row of the run.
        clock: dates the events that the recorder adds itself (`lost`).
        batch_events: events per batch, a link of the hash chain, at most.
        queue_events: events that may wait for the writer.
        overflow: `block` waits for room; `drop` loses events and says so with a `lost` event in their place.
        max_latency_s: how long an event may wait for others to share its transaction.
        resume: go on with a log that a dead process left; events it already has are compared and dropped.
        key: of the content hashes, 32 bytes; by default the folder's, drawn when there is none.

    Raises LogExists, LogMissing, KeyMismatch, LogUnreadable, LogWriteFailed on opening. A failure in the writer is
    kept and raised as LogWriteFailed by every later record, flush and close.
    """

    def __init__(
        self,
        path: str | Path,
        run: RunRow,
        *,
        clock: Clock,
        batch_events: int = 512,
        queue_events: int = 65_536,
        overflow: Literal["block", "drop"] = "block",
        max_latency_s: float = 0.05,
        resume: bool = False,
        key: bytes | None = None,
    ) -> None:
        if batch_events < 1 or queue_events < batch_events:
            raise ValueError(f"need 1 <= batch_events <= queue_events, got {batch_events} and {queue_events}")
        if overflow not in ("block", "drop"):
            raise ValueError(f"overflow is block or drop, not {overflow!r}")
        self.path = new_segment(Path(path)) if Path(path).is_dir() else Path(path)
        self.run_id = run.run_id
        self._clock = clock
        self._batch_events = batch_events
        self._queue_events = queue_events
        self._drops = overflow == "drop"
        self._max_latency_s = max_latency_s
        self._queue: deque[Item] = deque()
        self._marks: dict[str, _Mark] = {}
        self._last_trial = self._last_certification = -1
        self._failure: BaseException | None = None
        self._closing = False
        self._closed = False
        self._idle = False
        self._urgent = 0
        self._handed = self._done = 0
        self._acknowledged = 0
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._progress = threading.Condition(lock)
        self._writer = self._open(run, resume, key)
        self._thread = threading.Thread(target=self._write_all, name="kvtape-writer", daemon=True)
        self._thread.start()
        atexit.register(self._close_at_exit)

    def _open(self, run: RunRow, resume: bool, key: bytes | None) -> LogWriter:
        """Open the file and write the run's row, so that a disk that cannot be written shows at once."""
        try:
            writer = LogWriter.resume(self.path, key) if resume else LogWriter.create(self.path, run, key)
        except (OSError, duckdb.Error) as err:
            raise self._write_error(err) from err
        try:
            self._builder = BatchBuilder(writer.key)
            if holds_run(writer, run):
                self._last_trial = last_number(writer, TRIALS, run.run_id)
                self._last_certification = last_number(writer, CERTIFICATIONS, run.run_id)
                for stored in recorded_sessions(writer, run.run_id, self._builder):
                    self._marks[stored.row.session_id] = _Mark(stored.row, stored)
            else:
                writer.append(self._builder.build_run(run))
            limit_memory(writer.connection)
        except BaseException as err:
            writer.close()
            if isinstance(err, OSError | duckdb.Error):
                raise self._write_error(err) from err
            raise
        return writer

    def open_session(self, row: SessionRow) -> None:
        """Announce a session; before its first event. The same row again is a resend and changes nothing."""
        self._check_run(row.run_id)
        with self._work:
            mark = self._marks.get(row.session_id)
            if mark is None:
                self._put(Item(session=row))
                self._marks[row.session_id] = _Mark(row)
            elif mark.row != row:
                raise SequenceConflict(
                    f"{self.path}: run {self.run_id} has a session {row.session_id} with another row"
                )

    def record(
        self,
        event: Event,
        *,
        tokens: Sequence[int] | None = None,
        plan: PlanRow | None = None,
        blocks: Sequence[BlockRow] = (),
        scores: Sequence[ScoreRow] = (),
    ) -> None:
        """Hand over one event with what belongs to it. Durable only after `flush`.

        `tokens` belong to prefill, decode and recompute, one for each position of [start, stop); their hashes are
        always stored, the ids only when the session's row says `content`.

        Raises SequenceGap, SequenceConflict, ValueError (the event is not stored), LogWriteFailed, RecorderClosed.
        """
        self._check_run(event.run_id)
        _check_texts(event)
        if scores:
            _check_scores(scores)
        held = None if tokens is None else _checked_tokens(event, tokens)
        with self._work:
            mark = self._marks.get(event.session_id)
            if mark is None:
                raise SequenceError(f"session {event.session_id} was not opened; call open_session first")
            if event.seq == mark.next_seq:
                item = Item(event=event, tokens=held, plan=plan, blocks=tuple(blocks), scores=tuple(scores))
                self._put_event(mark, item)
                return
            if event.seq > mark.next_seq:
                raise SequenceGap(
                    f"session {event.session_id}: seq {event.seq} came, {mark.next_seq} is next; it was not stored"
                )
        self._compare(event, held)

    def add_trials(self, rows: Sequence[TrialRow]) -> None:
        """Hand over results of an evaluation; durable only after `flush`. Their numbers go up within the run.

        Raises SequenceConflict for a number that is not past the last one, ValueError for a number that is not
        finite, LogWriteFailed, RecorderClosed; none of `rows` is then stored.
        """
        last = self._last_trial
        for row in rows:
            self._check_run(row.run_id)
            if row.trial <= last:
                raise SequenceConflict(f"{self.path}: trial {row.trial} came, the last of run {self.run_id} is {last}")
            if not all(math.isfinite(x) for x in (row.nll, row.kl) if x is not None):
                raise ValueError(f"trial {row.trial}: nll {row.nll}, kl {row.kl}: what is not finite has no place here")
            last = row.trial
        if rows:
            with self._work:
                self._put(Item(trials=tuple(rows)))
                self._last_trial = last

    def add_certifications(self, rows: Sequence[CertificationRow]) -> None:
        """Hand over rows of proofs; durable only after `flush`. Numbers and errors as of `add_trials`."""
        last = self._last_certification
        for row in rows:
            self._check_run(row.run_id)
            if row.certification <= last:
                what = f"certification {row.certification} came, the last of run {self.run_id} is {last}"
                raise SequenceConflict(f"{self.path}: {what}")
            numbers = (row.value, row.low, row.high, row.threshold)
            if not all(math.isfinite(x) for x in numbers if x is not None):
                raise ValueError(f"certification {row.certification}: {numbers}: what is not finite has no place here")
            last = row.certification
        if rows:
            with self._work:
                self._put(Item(certifications=tuple(rows)))
                self._last_certification = last

    def _put_event(self, mark: _Mark, item: Item) -> None:
        """Queue the event or, when dropping, only count it. Needs the lock."""
        event = item.event
        assert event is not None
        if self._drops and len(self._queue) >= self._queue_events:
            self._raise_failure()
            mark.dropped += 1
        else:
            if mark.dropped:
                self._put(Item(event=self._lost(event.session_id, mark)))
            self._put(item)
            mark.turn, mark.generation = event.turn, event.generation
        mark.next_seq += 1

    def _put(self, item: Item) -> None:
        """Queue one item, waiting for room when asked to. Needs the lock."""
        self._raise_failure()
        while not self._drops and len(self._queue) >= self._queue_events:
            self._progress.wait()
            self._raise_failure()
        if self._closing:
            raise RecorderClosed(f"{self.path}: the recorder is closed")
        self._queue.append(item)
        self._handed += 1
        if self._idle or len(self._queue) == self._batch_events:
            self._work.notify()

    def _lost(self, session_id: str, mark: _Mark) -> Event:
        lost = mark.dropped
        mark.dropped = 0
        return Event(
            run_id=self.run_id,
            session_id=session_id,
            seq=mark.next_seq - lost,
            at_ns=self._clock.now_ns(),
            op=Op.LOST,
            turn=mark.turn,
            generation=mark.generation,
            reason=LOST_REASON,
            detail=lost_detail(lost),
        )

    def _account_for_drops(self) -> None:
        """Write the `lost` events that are still owed. Needs the lock."""
        for session_id, mark in self._marks.items():
            if mark.dropped:
                self._queue.append(Item(event=self._lost(session_id, mark)))
                self._handed += 1

    def _compare(self, event: Event, tokens: tuple[int, ...] | None) -> None:
        """A seq that is already there: the same content is a resend and dropped. Raises SequenceConflict."""
        self.flush()
        check_same_event(self._writer, event, tokens)
        mark = self._marks[event.session_id]
        if mark.stored is not None:
            with self._work:  # rebuilds the tape of a session that a dead process began
                mark.stored.replay(self._builder, event, tokens)

    def flush(self) -> int:
        """Return once everything recorded so far is durable. The number of events acknowledged since opening.

        Raises LogWriteFailed, RecorderClosed.
        """
        with self._work:
            self._raise_failure()
            if self._closed:
                raise RecorderClosed(f"{self.path}: the recorder is closed")
            self._account_for_drops()
            wanted = self._handed
            self._urgent += 1
            self._work.notify()
            try:
                while self._done < wanted:
                    self._progress.wait()
                    self._raise_failure()
            finally:
                self._urgent -= 1
            return self._acknowledged

    def close(self) -> None:
        """Make everything recorded durable and give the file free. Idempotent. Raises LogWriteFailed."""
        if self._closed:
            return
        self._stop_writer()
        self._writer.close()
        self._closed = True
        atexit.unregister(self._close_at_exit)
        self._raise_failure()

    def seal(self) -> None:
        """Close, and turn the log into one checkpointed file. Raises LogWriteFailed; the log stays readable."""
        if self._closed:
            raise RecorderClosed(f"{self.path}: the recorder is closed")
        self._stop_writer()
        try:
            self._raise_failure()
            unlimited_memory(self._writer.connection)
            seal_log(self._writer)
        except (OSError, duckdb.Error, LogUnreadable) as err:
            raise LogWriteFailed(
                f"{self.path}: sealing failed ({_cause(err)}); every row is safe in it and its write-ahead log: make "
                f"room, then seal it with `kvtape repair {self.path} --out NEW`"
            ) from err
        finally:
            self.close()

    def _stop_writer(self) -> None:
        with self._work:
            self._account_for_drops()
            self._closing = True
            self._work.notify()
        self._thread.join()

    def _close_at_exit(self) -> None:
        """A recorder that nobody closed still writes what it was given."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except LogWriteFailed:
            if kind is None:  # else the first error is the one to see
                raise

    def _write_all(self) -> None:
        """The writer thread."""
        try:
            while True:
                items = self._take()
                if not items:
                    return
                n = self._batch_events
                batches = [self._builder.build(items[i : i + n]) for i in range(0, len(items), n)]
                self._writer.append_group(batches)
                self._acknowledge(items)
        except BaseException as err:
            with self._work:
                self._failure = err
                self._progress.notify_all()

    def _take(self) -> list[Item]:
        """Wait for batches: full, old enough, wanted by a flush, or the rest on closing. Empty at the end."""
        with self._work:
            self._idle = True
            while not self._queue and not self._closing:
                self._work.wait()
            self._idle = False
            if not self._hurry():
                self._work.wait_for(self._hurry, timeout=self._max_latency_s)
            queue, most = self._queue, _GROUP * self._batch_events
            if len(queue) <= most:  # nobody waits for the lock while a whole queue is emptied
                self._queue = deque()
            else:
                queue = deque(queue.popleft() for _ in range(most))
            self._progress.notify_all()
        return list(queue)

    def _hurry(self) -> bool:
        return len(self._queue) >= self._batch_events or self._urgent > 0 or self._closing

    def _acknowledge(self, items: Sequence[Item]) -> None:
        events = sum(1 for i in items if i.event is not None)
        with self._work:
            self._done += len(items)
            self._acknowledged += events
            self._progress.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._write_error(self._failure) from self._failure

    def _write_error(self, cause: BaseException) -> LogWriteFailed:
        return LogWriteFailed(
            f"{self.path}: writing failed ({_cause(cause)}); the {self._acknowledged} acknowledged events are safe, "
            f"later ones are not: make room or choose another disk, and record into a new log"
        )

    def _check_run(self, run_id: str) -> None:
        if run_id != self.run_id:
            raise ValueError(f"this recorder writes run {self.run_id}, not {run_id}")


def _cause(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _check_texts(event: Event) -> None:
    for text in (event.reason, event.detail, event.error_class):
        if text is not None and not text.isascii():
            text.encode()  # a lone surrogate must fail here, not in the writer


def _check_scores(scores: Sequence[ScoreRow]) -> None:
    for row in scores:
        if not math.isfinite(sum(row.mass) + sum(row.peak)):
            raise ValueError(f"seq {row.seq}: the attention to block {row.block_id} is not finite")


def _checked_tokens(event: Event, tokens: Sequence[int]) -> tuple[int, ...]:
    if event.op not in TOKEN_OPS:
        raise ValueError(f"seq {event.seq}: {event.op} brings no tokens")
    if event.start is None or event.stop is None or event.stop - event.start != len(tokens):
        raise ValueError(f"seq {event.seq}: {len(tokens)} tokens for [{event.start}, {event.stop})")
    return tuple(tokens)
