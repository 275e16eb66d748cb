"""Kill an engine host at a random point of a recorded session, and see what is left.

Each run draws from its seed which call is under way when the signal goes out, how long after its beginning, and which
signal. Then the session must be fatal with device_lost, the log must hold every event that was recorded and verify,
and the slot must open again on a new host, under a new generation.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtape.backends.errors import FatalClass, SessionFatal, StaleSlot
from kvtape.backends.isolated.backend import OPERATIONS, IsolatedBackend
from kvtape.backends.isolated.engine import IsolatedEngine, open_isolated
from kvtape.backends.protocol import Choose, DecodeRun, Engine, Logits, SessionConfig
from kvtape.backends.session import Session
from kvtape.backends.slot import SlotHandle, SlotState
from kvtape.backends.slots import SlotPool
from kvtape.planner.events import Op
from kvtape.planner.residency import fold
from kvtape.planner.specs import parse_policy
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from kvtape.traces.verify import verify
from support.logs import KEY, TickClock, run_row

__all__ = ["KillPlan", "KilledPool", "Outcome"]

SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGTERM)
CALLS = 150
STEPS = 5000
CONFIG = SessionConfig(n_ctx=256, chunk=32, kv_type_k="f32", kv_type_v="f32", cold_budget_tokens=256)
POLICY = parse_policy("stream:sink=4,recent=60")


@dataclass(frozen=True, slots=True)
class KillPlan:
    """`signal` goes to the host `delay_s` after the `call`th call (a token of a decode counts as one) has begun."""

    seed: int
    call: int
    delay_s: float
    signal: int

    @classmethod
    def drawn(cls, seed: int) -> KillPlan:
        rng = np.random.default_rng(seed)
        drawn = int(rng.integers(1, CALLS)), float(rng.exponential(0.0005)), int(rng.integers(len(SIGNALS)))
        return cls(seed, drawn[0], drawn[1], SIGNALS[drawn[2]])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The operation that found the host dead, as the log's cause names it; the events of both sessions."""

    operation: str
    signal: str
    events: int


class KilledPool:
    """A pool of one slot whose engines run in hosts that are killed, run after run."""

    def __init__(self, engine: str, model: Path) -> None:
        self._model = f"{engine}:{model}"
        self._pool = SlotPool(1, self._load, self._open, TickClock(), idle_ns=0)
        self._recorder: Recorder | None = None
        self._plan: KillPlan | None = None
        self._pid = 0

    def run(self, log: Path, plan: KillPlan) -> Outcome:
        """One kill, on a new log. Raises AssertionError where anything is not as it must be."""
        with Recorder(log, run_row(), clock=TickClock(), key=KEY) as recorder:
            self._recorder, self._plan = recorder, plan
            session, handle, fatal = self._until_it_dies(plan)
            killed_pid = self._pid
            assert fatal.fatal_class is FatalClass.DEVICE_LOST, fatal
            _refuses(session)
            assert not Path(f"/proc/{killed_pid}").exists(), "the dead host is still there"
            self._reopens(handle, [*session.tape[:40], 5])
            assert self._pid != killed_pid
            recorder.seal()
        return _outcome(log, session, fatal.cause_message, plan)

    def close(self) -> None:
        self._pool.close()

    def _until_it_dies(self, plan: KillPlan) -> tuple[Session, SlotHandle, SessionFatal]:
        try:
            with self._pool.acquire(self._model) as lease:
                session, handle = lease.session, lease.handle
                _play(session, np.random.default_rng(plan.seed))
        except SessionFatal as fatal:
            return session, handle, fatal
        raise AssertionError("the host was not killed in time")

    def _reopens(self, stale: SlotHandle, prompt: Sequence[int]) -> None:
        """The slot under a new generation, on a new host; the handle of the dead session does nothing."""
        (status,) = self._pool.status()
        assert (status.state, status.handle.generation > stale.generation) == (SlotState.EMPTY, True), status
        assert status.fatal is not None
        try:
            with self._pool.lease(stale):
                raise AssertionError("a handle of the dead session was taken")
        except StaleSlot:
            pass
        with self._pool.acquire(self._model) as lease:
            assert lease.handle.generation > stale.generation
            lease.session.ensure_prefix(prompt)
            lease.session.decode(3)
            lease.session.close()

    def _load(self, model: str) -> IsolatedEngine:
        name, _, path = model.partition(":")
        return open_isolated(name, path)

    def _open(self, engine: Engine, handle: SlotHandle) -> Session:
        assert isinstance(engine, IsolatedEngine)
        assert self._recorder is not None
        backend: Any = engine.open(CONFIG)
        assert engine.host_pid is not None
        self._pid = engine.host_pid
        if self._plan is not None:
            backend, self._plan = _Watched(backend, self._plan, self._pid), None
        name = f"slot{handle.slot}-{handle.generation:06}"
        return Session(
            backend, POLICY, self._recorder, TickClock(), run_id=run_row().run_id, session_id=name, content=True
        )


def _outcome(log: Path, session: Session, cause: str, plan: KillPlan) -> Outcome:
    """The log verifies and holds all that the killed session did, and the session that came after it."""
    found = verify(log)
    assert found.ok, found
    with open_log(log) as tape:
        run = tape.default_run().run_id
        killed, again = (tape.events(run, row.session_id) for row in tape.sessions(run))
    assert [e.seq for e in killed] == list(range(len(killed)))
    assert [e.op for e in killed[-2:]] == [Op.FATAL, Op.CLOSE]
    assert (killed[-2].reason, killed[-2].error_class) == (cause, "device_lost")
    assert fold(killed) == session._parts.state
    assert again[-1].op is Op.CLOSE
    words = cause.removeprefix("the engine host died of ").split()
    assert words[0] == signal.Signals(plan.signal).name, cause
    return Outcome(words[2].rstrip(":"), words[0], len(killed) + len(again))


class _Watched:
    """The backend, with the calls counted and the kill sent when its time has come."""

    def __init__(self, inner: IsolatedBackend, plan: KillPlan, pid: int) -> None:
        self._inner, self._plan, self._pid, self._calls = inner, plan, pid, 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return self._counted(value) if name in OPERATIONS else value

    def decode_until(self, n: int, limit: int, tape_start: int, logits: Logits, choose: Choose) -> DecodeRun:
        return self._inner.decode_until(n, limit, tape_start, logits, self._counted(choose))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self._calls += 1
            if self._calls == self._plan.call:
                threading.Timer(self._plan.delay_s, os.kill, [self._pid, self._plan.signal]).start()
            return call(*arguments)

        return counted


def _play(session: Session, rng: np.random.Generator) -> None:
    """Everything a session can do, in seeded order, until it dies of it."""

    def draw(n: int) -> list[int]:
        return [int(t) for t in rng.integers(3, 259, n)]

    snapshots: list[int] = []
    session.ensure_prefix(draw(40))
    for _ in range(STEPS):
        step = int(rng.integers(7))
        if step == 0:
            keep = int(rng.integers(len(session.tape) // 2, len(session.tape)))
            session.ensure_prefix([*session.tape[:keep], *draw(30)])
        elif step == 1:
            said = iter(draw(20))
            session.decode(20, choose=lambda _, said=said: next(said), stop_tokens=frozenset())  # type: ignore[misc]
        elif step == 2:
            session.prefill_suffix(draw(50))
        elif step == 3 and session.cold_block_ids and session._parts.free_rows > 64:
            session.admit(session.cold_block_ids[-1])
        elif step == 4:
            session.compact()
        elif step == 5:
            snapshots.append(session.snapshot())
        elif step == 6 and snapshots:
            session.restore(snapshots[-1])
            session.ensure_prefix([*session.tape, *draw(5)])


def _refuses(session: Session) -> None:
    for call in (lambda: session.decode(1), session.snapshot, lambda: session.ensure_prefix([4])):
        try:
            call()
        except SessionFatal:
            continue
        raise AssertionError("a poisoned session did something")
