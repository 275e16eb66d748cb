"""Recorder and reader against a plain list per session, through flushes, resends, crashes, reopening and sealing."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvtape.planner.events import Event, Op
from kvtape.traces.errors import LogExists, SequenceConflict, SequenceGap
from kvtape.traces.live import snapshot
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from kvtape.traces.schema import EVENTS
from kvtape.traces.verify import verify
from support.forge import copy_log
from support.logs import KEY, TickClock, event, rows_of, run_row, session_row

names = st.sampled_from(["a", "b"])


class RecorderMachine(RuleBasedStateMachine):
    """`sent` is the model; `durable` how many events of each session were acknowledged."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvtape-test-"))
        self.logs = 0
        self.sent: dict[str, list[Event]] = {}
        self.durable: dict[str, int] = {}
        self.recorder = self.open(resume=False)

    @property
    def path(self) -> Path:
        return self.folder / f"{self.logs}.duckdb"

    def open(self, resume: bool) -> Recorder:
        return Recorder(
            self.path, run_row(), clock=TickClock(), key=KEY, batch_events=3, max_latency_s=0.001, resume=resume
        )

    def session(self, name: str) -> list[Event]:
        if name not in self.sent:
            self.recorder.open_session(session_row(name))
            self.sent[name] = []
        return self.sent[name]

    @rule(name=names, made=rows_of(EVENTS).filter(lambda e: e.op != Op.LOST), n=st.integers(1, 4))
    def record(self, name: str, made: Event, n: int) -> None:
        sent = self.session(name)
        for _ in range(n):
            e = self.renamed(made, name, len(sent))
            self.recorder.record(e)
            sent.append(e)

    @staticmethod
    def renamed(made: Event, name: str, seq: int) -> Event:
        columns = {f: getattr(made, f) for f in EVENTS.columns}
        return Event(**(columns | {"run_id": "r0", "session_id": name, "seq": seq}))

    @rule(name=names, data=st.data())
    def resend(self, name: str, data: st.DataObject) -> None:
        if self.session(name):
            self.recorder.record(data.draw(st.sampled_from(self.sent[name])))
            self.acknowledge()

    @rule(name=names, data=st.data())
    def resend_changed(self, name: str, data: st.DataObject) -> None:
        if self.session(name):
            old = data.draw(st.sampled_from(self.sent[name]))
            with pytest.raises(SequenceConflict):
                self.recorder.record(replace(old, at_ns=old.at_ns ^ 1))
            self.acknowledge()

    @rule(name=names, ahead=st.integers(1, 3))
    def leave_a_gap(self, name: str, ahead: int) -> None:
        seq = len(self.session(name)) + ahead
        with pytest.raises(SequenceGap):
            self.recorder.record(event(seq, session_id=name))

    @rule()
    def flush(self) -> None:
        self.recorder.flush()
        self.acknowledge()

    def acknowledge(self) -> None:
        """A flush, also the one inside a resend, makes everything sent so far durable."""
        self.durable = {name: len(events) for name, events in self.sent.items()}

    @rule()
    def crash(self) -> None:
        """Go on with the files as they are at this moment, as after a kill; unacknowledged events may be gone."""
        left = self.path
        self.logs += 1
        snapshot(left, self.folder)
        copy_log(self.folder / "snapshot.duckdb", self.path)
        self.recorder.close()
        self.recorder = self.open(resume=True)
        self.sent = self.stored()

    @rule()
    def close_and_go_on(self) -> None:
        self.recorder.close()
        self.acknowledge()
        assert self.stored() == self.sent
        self.recorder = self.open(resume=True)

    @rule()
    def seal_and_begin_anew(self) -> None:
        self.recorder.seal()
        self.acknowledge()
        assert self.stored() == self.sent
        with pytest.raises(LogExists):
            self.open(resume=True)
        self.logs += 1
        self.sent, self.durable = {}, {}
        self.recorder = self.open(resume=False)

    @rule()
    def look(self) -> None:
        self.stored()

    def stored(self) -> dict[str, list[Event]]:
        """What a reader finds: a verified log with a beginning of what was sent, at least what was acknowledged."""
        result = verify(self.path)
        assert result.ok, result.findings
        with open_log(self.path) as log:
            found = {s.session_id: log.events("r0", s.session_id) for s in log.sessions("r0")}
        for name, events in self.sent.items():
            kept = found.get(name, [])
            assert kept == events[: len(kept)]
            assert len(kept) >= self.durable.get(name, 0)
        return found

    def teardown(self) -> None:
        self.recorder.close()
        shutil.rmtree(self.folder)


RecorderMachine.TestCase.settings = settings(
    max_examples=5,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestRecorderMachine = RecorderMachine.TestCase
