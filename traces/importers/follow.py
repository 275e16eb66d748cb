"""`follow`: what a server writes becomes events as it is written, in a log that can be read meanwhile.

    line -> step, once it is certain -> rows that wait -> one transaction -> mark (`marks`)

Rows are committed when nothing new is there to be read, when there are many, and at the latest half a second after the
first. Input read again after a crash makes the same rows; those that the log has are left out (`resending`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import duckdb
import msgspec

from kvtape.planner.rows import RunRow
from kvtape.traces.codec import to_arrow
from kvtape.traces.database import one_line
from kvtape.traces.errors import LogUnreadable, LogWriteFailed, TraceError
from kvtape.traces.importers.errors import SourceRejected
from kvtape.traces.importers.events import EventMaker
from kvtape.traces.importers.followed import FollowedSource, Pace, Patience
from kvtape.traces.importers.importing import ImportResult, import_config, import_run
from kvtape.traces.importers.marks import Mark, Place, drop_mark, write_mark
from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import Asked, Reader, Record
from kvtape.traces.importers.resending import Resent
from kvtape.traces.importers.tail import Tail
from kvtape.traces.importers.writing import taken_rows
from kvtape.traces.query import select_rows
from kvtape.traces.schema import EVENTS, RUNS
from kvtape.traces.seal import seal_log
from kvtape.traces.writer import LogWriter

__all__ = ["Followed", "Follower"]

_BATCH_EVENTS = 2_048
_LATENCY_NS = 500_000_000
_CUT = "the file was cut; what was written between the last look and the cut was not seen"
_LONG = "a line of more than 16 MiB; only its beginning was looked at"


@dataclass(frozen=True, slots=True)
class Followed:
    """What is followed and how. `source`: of `marks.source_id`, None for a pipe. `keep_mark`: another log goes on."""

    reader: Reader
    tail: Tail
    place: Place
    source: str | None
    patience: Patience
    content: bool = False
    keep_mark: bool = False


class Follower:
    """Follows into `log`: a new one, or with `resume` one that was not sealed.

    Raises LogExists, LogWriteFailed, SourceRejected, TraceError as `run` does; what was committed stays.
    """

    def __init__(self, asked: Followed, log: Path, pace: Pace, *, kvtape_version: str, resume: bool = False) -> None:
        self._asked, self._log, self._pace, self._version = asked, log, pace, kvtape_version
        self._resume = resume
        self.notes = Notes()
        self._feed = asked.place.feed()
        self._source = FollowedSource(asked.tail, self._feed, pace, asked.patience, self._between)
        self._writer: LogWriter | None = None
        self._maker: EventMaker | None = None
        self._resent: Resent | None = None
        self._cuts = self._long = 0
        self._records = self._events = self._last_ns = self._zero = 0
        self._since: int | None = None

    def run(self) -> ImportResult:
        """Follow to the end, and seal the log.

        Raises SourceRejected and TraceError where there was nothing to import; where a line is refused or the disk is
        full the error says what the log has.
        """
        try:
            return self._run()
        except (OSError, duckdb.Error) as err:
            raise LogWriteFailed(
                f"{self._log}: writing failed ({one_line(err)}); the {self._events} events committed before are safe: "
                "make room and start again, which goes on from there"
            ) from err
        finally:
            self._source.close()
            if self._writer is not None:
                self._writer.close()

    @property
    def resent(self) -> int:
        """Events that came again and were there."""
        return 0 if self._resent is None else self._resent.events

    def _run(self) -> ImportResult:
        refused: SourceRejected | None = None
        try:
            for record in self._asked.reader.read(self._source, self.notes, Asked()):
                self._take(record)
        except SourceRejected as err:
            if self._maker is None:
                raise
            refused = err
        if self._maker is None or self._writer is None:
            return self._nothing()
        for _ in self._maker.closing():
            self._flush_if(len(self._maker.events) >= _BATCH_EVENTS)
        self._flush()
        self._seal(self._writer)
        if refused is not None:
            told = str(refused).replace("nothing was imported", f"what came before it is in {self._log}")
            raise TraceError(told) from refused
        return self._result(self._maker)

    def _nothing(self) -> ImportResult:
        """No row came: no log was made. That is as it should be where it was asked to stop, or went on."""
        if not self._pace.stopped and not self._asked.place.skipped:
            raise TraceError(f"{self._source.name}: no request in it; nothing was imported")
        return ImportResult(self._asked.reader.name, 0, 0, 0, 0, 0, 0, self.notes.warnings())

    def _take(self, record: Record) -> None:
        if self._maker is None:
            self._begin(record.at_ns)
        assert self._maker is not None
        if record.at_ns < self._zero:
            text = "dated before the first row: it stands at the log's beginning"
            self.notes.warn("time_back", self._source.name, record.line, text)
            record = msgspec.structs.replace(record, at_ns=self._zero)
        self._records += 1
        self._last_ns = max(self._last_ns, record.at_ns)
        self._maker.add(record, record.session or f"line-{record.line:07d}")
        if self._since is None:
            self._since = self._pace.now_ns()
        self._flush_if(len(self._maker.events) >= _BATCH_EVENTS)

    def _begin(self, at_ns: int) -> None:
        """The log is made with its first row; what goes on has its run already."""
        self._zero = self._last_ns = at_ns
        if self._resume:
            self._writer = writer = LogWriter.resume(self._log)
            runs: list[RunRow] = select_rows(writer.connection, RUNS, "true", [])
            if len(runs) != 1 or runs[0].kind != "import":
                raise TraceError(f"{self._log}: no log of a follower; follow into a new one")
            run, self._zero = runs[0], runs[0].started_at_ns
            self._resent = Resent(writer, run.run_id)
        else:
            run = self._run_row(at_ns)
            self._writer = writer = LogWriter.create(self._log, run)
            writer.append({RUNS.name: to_arrow(RUNS, [run])})
        name = self._asked.reader.name
        self._maker = EventMaker(run.run_id, name, self._zero, writer.key, content=self._asked.content)

    def _run_row(self, zero: int) -> RunRow:
        """Its id tells two sources apart, and in a log folder two logs of one source."""
        place = self._asked.place
        told = [str(self._asked.source), str(place.line), str(place.skipped), str(zero), self._log.name]
        config = import_config(self._asked.reader, Asked(), content=self._asked.content)
        return import_run(config, told, zero, kvtape_version=self._version)

    def _between(self, quiet: bool) -> None:
        name, line = self._source.name, self._feed.line
        if self._feed.cut > self._cuts:
            self.notes.warn("file_cut", name, line, _CUT, self._feed.cut - self._cuts)
        if self._feed.too_long > self._long:
            self.notes.warn("line_long", name, line, _LONG, self._feed.too_long - self._long)
        self._cuts, self._long = self._feed.cut, self._feed.too_long
        late = self._since is not None and self._pace.now_ns() - self._since >= _LATENCY_NS
        self._flush_if(quiet or late)

    def _flush_if(self, due: bool) -> None:
        if due:
            self._flush()

    def _flush(self) -> None:
        """Commit the rows that wait, then note of what bytes they were made."""
        self._since = None
        if self._maker is None or self._writer is None or not len(self._maker.events):
            return
        tables = taken_rows(self._maker)
        if self._resent is not None:
            tables = self._resent.left(tables)
        if tables:
            self._writer.append(tables)
            self._events += tables[EVENTS.name].num_rows
        if self._resent is None or self._resent.complete:  # else the old mark still tells what the log was made of
            self._write_mark()

    def _write_mark(self) -> None:
        if self._asked.source is None:
            return
        place = self._asked.place
        write_mark(
            self._log,
            Mark(
                source=self._asked.source,
                format=self._asked.reader.name,
                content=self._asked.content,
                start=place.skipped,
                start_line=place.line,
                line=self._feed.line,
                parts=self._feed.parts(),
            ),
        )

    def _seal(self, writer: LogWriter) -> None:
        self._write_mark()
        try:
            seal_log(writer)
        except LogUnreadable as err:
            raise LogWriteFailed(f"{self._log}: sealing failed ({err}); every row is safe in it") from err
        if not self._asked.keep_mark:
            drop_mark(self._log)

    def _result(self, maker: EventMaker) -> ImportResult:
        return ImportResult(
            format=self._asked.reader.name,
            rows=self._records + self.notes.folded,
            sessions=maker.n_sessions,
            events=self._events,
            duplicates=len(self._source.repeated),
            folded=self.notes.folded,
            span_ns=self._last_ns - self._zero,
            warnings=self.notes.warnings(),
        )
