"""Any order of what happens to a pool's slots, beside a plain model of it; over whatever engine a world brings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import (
    FatalClass,
    KvtapeError,
    SessionClosed,
    SessionFatal,
    SlotBusy,
    StaleSlot,
)
from kvtape.backends.protocol import Engine, SessionConfig
from kvtape.backends.session import Session
from kvtape.backends.slot import SlotHandle, SlotState
from kvtape.backends.slots import SlotPool
from kvtape.planner.residency import fold
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink
from support.watched import WatchedBackend, WatchedEngine

__all__ = ["SlotMachine", "World", "open_slot_session"]

N_SLOTS = 3
IDLE_NS = 1000
MODELS = ("a", "b")


@dataclass
class World:
    """`load` opens an engine for a model name; `spoil` makes a backend's next computation fail for real."""

    load: Callable[[str], Engine]
    spoil: Callable[[Any], None] = lambda backend: backend.abort_next()
    config: SessionConfig = field(default_factory=lambda: SessionConfig(n_ctx=64, chunk=16, cold_budget_tokens=32))
    violations: list[str] = field(default_factory=list)
    engines: list[WatchedEngine] = field(default_factory=list)
    sinks: dict[str, ListSink] = field(default_factory=dict)

    def load_watched(self, model: str) -> WatchedEngine:
        engine = WatchedEngine(self.load(model), self.violations)
        self.engines.append(engine)
        return engine


def open_slot_session(world: World, engine: Engine, handle: SlotHandle) -> Session:
    """A session of the world's configuration with an id of slot and generation, recorded in the world's sinks."""
    backend = engine.open(world.config)
    session_id = f"slot{handle.slot}.{handle.generation}"
    assert session_id not in world.sinks, "an id came twice"
    sink = world.sinks[session_id] = ListSink()
    policy = parse_policy("stream:sink=2,recent=9,block=4")
    return Session(backend, policy, sink, ManualClock(), run_id="pool", session_id=session_id)


@dataclass
class Expected:
    """A slot as it must be. `tape` is None without a session."""

    generation: int = 0
    model: str | None = None
    tape: list[int] | None = None
    used_ns: int = 0
    fatal: FatalClass | None = None

    @property
    def state(self) -> SlotState:
        if self.tape is not None:
            return SlotState.IDLE
        return SlotState.EMPTY if self.model is None else SlotState.LOADED


class HandClock:
    """Goes on when told to."""

    def __init__(self) -> None:
        self.now = 0

    def now_ns(self) -> int:
        return self.now


SLOT = st.integers(0, N_SLOTS - 1)
MODEL = st.sampled_from(MODELS)
TOKENS = st.lists(st.integers(3, 60), min_size=1, max_size=20)


class SlotMachine(RuleBasedStateMachine):
    """Subclasses give the world; a test may put a wrong pool in `pool_class`."""

    pool_class: ClassVar[type[SlotPool]] = SlotPool

    def world_of(self) -> World:
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.world = self.world_of()
        self.clock = HandClock()
        self.pool = self.pool_class(
            N_SLOTS,
            self.world.load_watched,
            lambda engine, handle: open_slot_session(self.world, engine, handle),
            self.clock,
            idle_ns=IDLE_NS,
        )
        self.expected = [Expected() for _ in range(N_SLOTS)]
        self.old: list[SlotHandle] = []

    def handle(self, slot: int) -> SlotHandle:
        return SlotHandle(slot, self.expected[slot].generation)

    def moved(self, slot: int, handle: SlotHandle | None = None) -> Expected:
        """The slot has a new generation; its old handle is remembered."""
        self.old.append(self.handle(slot))
        now = self.pool.status()[slot].handle
        assert now.generation > self.expected[slot].generation, "the generation must go up"
        assert handle is None or handle == now
        self.expected[slot].generation = now.generation
        return self.expected[slot]

    # -- the life of a slot ---------------------------------------------------------------------------------------

    @rule(slot=SLOT, model=MODEL)
    def load(self, slot: int, model: str) -> None:
        if self.expected[slot].model is not None:
            with pytest.raises(SlotBusy, match="holds"):
                self.pool.load(self.handle(slot), model)
            return
        handle = self.pool.load(self.handle(slot), model)
        self.moved(slot, handle).model = model

    @rule(slot=SLOT)
    def open(self, slot: int) -> None:
        if self.expected[slot].state is not SlotState.LOADED:
            with pytest.raises(SlotBusy, match="holds"):
                self.pool.open(self.handle(slot))
            return
        self.opened(slot, self.pool.open(self.handle(slot)))

    def opened(self, slot: int, handle: SlotHandle | None = None) -> None:
        there = self.moved(slot, handle)
        there.tape, there.fatal, there.used_ns = [], None, self.clock.now

    @rule(slot=SLOT, tokens=TOKENS)
    def use(self, slot: int, tokens: list[int]) -> None:
        if self.expected[slot].tape is None:
            with pytest.raises(SlotBusy), self.pool.lease(self.handle(slot)):
                pass
            return
        with self.pool.lease(self.handle(slot)) as lease:
            self.work(slot, lease.session, tokens)
            for call in (self.pool.open, self.pool.unload, lambda h: self.pool.switch(h, "a")):
                with pytest.raises(SlotBusy, match="leased"):
                    call(self.handle(slot))
            with pytest.raises(SlotBusy, match="leased"), self.pool.lease(self.handle(slot)):
                pass
        self.expected[slot].used_ns = self.clock.now
        with pytest.raises(StaleSlot, match="its lease is over"):
            _ = lease.session

    def work(self, slot: int, session: Session, tokens: list[int]) -> None:
        """The session is the one whose tape the model knows; what is computed goes on from there."""
        tape = self.expected[slot].tape
        assert tape is not None
        assert list(session.tape) == tape, "another session than the one that was opened here"
        session.prefill_suffix(tokens)
        tape += tokens
        backend = session._parts.backend
        assert backend.books() == session._parts.state.layout

    @precondition(lambda self: any(e.tape is not None for e in self.expected))
    @rule(data=st.data(), tokens=TOKENS)
    def fail(self, data: st.DataObject, tokens: list[int]) -> None:
        slot = data.draw(st.sampled_from([i for i, e in enumerate(self.expected) if e.tape is not None]))
        with self.pool.lease(self.handle(slot)) as lease:
            session = lease.session
            self.world.spoil(session._parts.backend)
            with pytest.raises(SessionFatal) as first:
                session.prefill_suffix(tokens)
            with pytest.raises(SessionFatal) as again:
                session.decode(1)
            assert again.value.cause_message == first.value.cause_message, "the first cause is kept"
        self.evicted(slot, first.value.fatal_class)

    def evicted(self, slot: int, fatal: FatalClass | None) -> None:
        there = self.moved(slot)
        there.tape, there.fatal = None, fatal
        if fatal is FatalClass.DEVICE_LOST:
            there.model = None

    @precondition(lambda self: any(e.tape is not None for e in self.expected))
    @rule(data=st.data(), inside=st.booleans())
    def close_session(self, data: st.DataObject, inside: bool) -> None:
        """By whoever has the lease, or by somebody who kept the session beyond it."""
        slot = data.draw(st.sampled_from([i for i, e in enumerate(self.expected) if e.tape is not None]))
        with self.pool.lease(self.handle(slot)) as lease:
            session = lease.session
            if inside:
                session.close()
        if not inside:
            session.close()
            with pytest.raises(StaleSlot), self.pool.lease(self.handle(slot)):
                pass
        self.evicted(slot, None)

    @rule(ns=st.integers(1, 600))
    def wait(self, ns: int) -> None:
        self.clock.now += ns

    @rule(slot=SLOT, model=MODEL)
    def make_ready(self, slot: int, model: str) -> None:
        """So that there is mostly a session to do something with."""
        if self.expected[slot].model is None:
            self.load(slot, model)
        if self.expected[slot].tape is None:
            self.open(slot)

    @rule(ns=st.sampled_from([0, 400, IDLE_NS]))
    def reap(self, ns: int) -> None:
        self.clock.now += ns
        due = [
            i
            for i, e in enumerate(self.expected)
            if e.state is SlotState.IDLE and self.clock.now - e.used_ns >= IDLE_NS
        ]
        reaped = self.pool.reap()
        assert [h.slot for h in reaped] == due
        for handle in reaped:
            self.moved(handle.slot, handle).tape = None

    @rule(slot=SLOT, model=MODEL)
    def switch(self, slot: int, model: str) -> None:
        handle = self.pool.switch(self.handle(slot), model)
        there = self.moved(slot, handle)
        there.model, there.tape = model, None

    @rule(slot=SLOT)
    def unload(self, slot: int) -> None:
        there = self.moved(slot, self.pool.unload(self.handle(slot)))
        there.model = there.tape = None

    @rule(model=MODEL, tokens=TOKENS)
    def acquire(self, model: str, tokens: list[int]) -> None:
        best = min(range(N_SLOTS), key=lambda i: (self.rank(i, model), i))
        before = self.expected[best]
        with self.pool.acquire(model) as lease:
            slot = lease.handle.slot
            assert self.rank(slot, model) == self.rank(best, model)
            there = self.expected[slot]
            if there.model != model or there.tape is None:
                self.opened(slot, lease.handle)
                there.model = model
            self.work(slot, lease.session, tokens)
        self.expected[slot].used_ns = self.clock.now
        assert before is self.expected[best]

    def rank(self, slot: int, model: str) -> tuple[int, int]:
        e = self.expected[slot]
        if e.model == model:
            return (0, -e.used_ns) if e.tape is not None else (1, 0)
        return (2, 0) if e.model is None else (3, e.used_ns)

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def stale(self, data: st.DataObject) -> None:
        """Every use of a handle from before is refused, and touches nothing."""
        handle = data.draw(st.sampled_from(self.old))
        before = (self.pool.status(), self.native_calls())
        uses: tuple[Callable[[SlotHandle], Any], ...] = (
            lambda h: self.pool.load(h, "a"),
            self.pool.open,
            lambda h: self.pool.switch(h, "b"),
            self.pool.unload,
            lambda h: self.pool.lease(h).__enter__(),
        )
        for use in uses:
            said: object = "nothing"
            try:
                use(handle)
            except KvtapeError as err:
                said = err
            assert isinstance(said, StaleSlot), f"a stale handle was taken: {said}"
            assert (said.slot, said.generation) == (handle.slot, handle.generation)
        assert (self.pool.status(), self.native_calls()) == before

    # -- what always holds ----------------------------------------------------------------------------------------

    def backends(self) -> list[WatchedBackend]:
        return [b for e in self.world.engines for b in e.backends]

    def native_calls(self) -> int:
        return sum(len(b.calls) + b.closes for b in self.backends())

    @invariant()
    def as_expected(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert not self.world.violations, "; ".join(self.world.violations)
        for e, seen in zip(self.expected, self.pool.status(), strict=True):
            assert seen.handle.generation == e.generation, "another generation"
            assert (seen.state, seen.model) == (e.state, e.model), "another state"
            assert seen.idle_ns == (self.clock.now - e.used_ns if e.tape is not None else None), "another idle time"
            assert (seen.fatal and seen.fatal.fatal_class) == e.fatal, "another cause"
        alive = [b for b in self.backends() if not b.closes]
        assert len(alive) == sum(e.tape is not None for e in self.expected), "a context without a slot, or none in one"
        assert not any(b.faults for b in alive), "a context that failed is still open"
        in_use = {e.model for e in self.expected} - {None}
        assert len([e for e in self.world.engines if not e.closes]) == len(in_use), (
            "an engine that nobody uses, or one too few"
        )

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.close()
        self.pool.close()
        with pytest.raises(SessionClosed):
            self.pool.load(self.pool.status()[0].handle, "a")
        assert [s.state for s in self.pool.status()] == [SlotState.EMPTY] * N_SLOTS
        assert not self.world.violations, "; ".join(self.world.violations)
        assert all(b.closes == 1 for b in self.backends())
        assert all(e.closes == 1 for e in self.world.engines)
        for sink in self.world.sinks.values():
            assert fold(sink.events).closed
