"""SlotPool over the toy: any order of events, wrong pools that the machine finds, threads, and what fails half way."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from kvtape.backends.errors import (
    EngineFault,
    EnvironmentProblem,
    FatalClass,
    InputRejected,
    NoFreeSlot,
    SessionFatal,
    SlotBusy,
    StaleSlot,
)
from kvtape.backends.session import Session
from kvtape.backends.slot import Lease, Slot, SlotHandle, SlotState
from kvtape.backends.slots import SlotPool
from kvtape.planner.events import Op
from support.slot_machine import HandClock, SlotMachine, World, open_slot_session
from support.watched import ToyEngine, WatchedBackend

pytestmark = pytest.mark.contract("I1")

SETTINGS = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class ToyMachine(SlotMachine):
    """The toy can also lose its device: with the session goes the engine."""

    def world_of(self) -> World:
        return World(load=ToyEngine)

    @rule(data=st.data())
    def lose_the_device(self, data: st.DataObject) -> None:
        open_slots = [i for i, e in enumerate(self.expected) if e.tape is not None]
        if not open_slots:
            return
        slot = data.draw(st.sampled_from(open_slots))
        model = self.expected[slot].model
        shared = [i for i, e in enumerate(self.expected) if i != slot and e.model == model]
        if shared:
            return  # the others keep the engine that was condemned; has a test of its own
        with pytest.raises(SessionFatal, match="device_lost"), self.pool.lease(self.handle(slot)) as lease:
            lose_device(lease.session)
        self.evicted(slot, FatalClass.DEVICE_LOST)


def lose_device(session: Session) -> None:
    """The engine dies under the session's next computation."""
    backend: Any = session._parts.backend

    def dead(*_: object) -> None:
        raise EngineFault(FatalClass.DEVICE_LOST, "the host died of signal 9 in prefill")

    backend.inner.prefill = dead
    session.prefill_suffix([5, 6])


TestSlots = ToyMachine.TestCase
TestSlots.settings = SETTINGS
TestSlots.pytestmark = [pytest.mark.timeout(200)]


# -- pools that are wrong in one thing -------------------------------------------------------------------------------


class TakesStaleHandles(SlotPool):
    """Looks at the slot's number alone."""

    def _current(self, handle: SlotHandle) -> Slot:
        return self._slots[handle.slot]


class KeepsThePoisoned(SlotPool):
    """A session that failed stays where it was."""

    def _evict(self, slot: Slot) -> None:
        slot.fatal = slot.session.fatal if slot.session is not None else None
        slot.generation += 1


class ReusesTheContext(SlotPool):
    """The session goes, but its native context is given to the next one of the slot."""

    _kept: WatchedBackend | None = None

    def _evict(self, slot: Slot) -> None:
        assert slot.session is not None
        if slot.session.fatal is not None:
            self._kept = slot.session._parts.backend  # type: ignore[assignment]
        super()._evict(slot)

    def _begin(self, slot: Slot) -> None:
        super()._begin(slot)
        if self._kept is not None and slot.session is not None:
            slot.session._parts.backend.close()
            slot.session._parts.backend = self._kept  # type: ignore[assignment]


class ForgetsTheGeneration(SlotPool):
    """A reaped slot keeps its generation, so that old handles go on to the next session."""

    def _end(self, slot: Slot, reason: str) -> None:
        super()._end(slot, reason)
        if reason == "idle":
            slot.generation -= 1


class LeaksTheSession(SlotPool):
    """A switch forgets to close what was there."""

    def _clear(self, slot: Slot, reason: str) -> None:
        if reason == "switch":
            slot.session = None
        super()._clear(slot, reason)


class ReapsWhatIsUsed(SlotPool):
    """Counts from the opening instead of the last use."""

    @contextmanager
    def _lent(self, slot: Slot) -> Any:
        before = slot.used_ns
        with super()._lent(slot) as lease:
            yield lease
        slot.used_ns = before


WRONG: dict[type[SlotPool], str] = {
    TakesStaleHandles: "a stale handle was taken",
    KeepsThePoisoned: "another state",
    ReusesTheContext: "on a context that failed|freed twice",
    ForgetsTheGeneration: "the generation must go up",
    LeaksTheSession: "an engine was closed under a session|a context without a slot",
    ReapsWhatIsUsed: "another idle time",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.__name__)
def test_the_machine_finds_a_wrong_pool(wrong: type[SlotPool]) -> None:
    class Machine(ToyMachine):
        pool_class = wrong

    hunt = settings(SETTINGS, max_examples=200, database=None, derandomize=True, phases=[Phase.generate])
    with pytest.raises(AssertionError, match=WRONG[wrong]):
        run_state_machine_as_test(Machine, settings=hunt)


# -- what fails half way ---------------------------------------------------------------------------------------------


def make(n_slots: int = 2, **world: Any) -> tuple[SlotPool, World, HandClock]:
    there = World(**{"load": ToyEngine} | world)
    clock = HandClock()
    pool = SlotPool(n_slots, there.load_watched, lambda e, h: open_slot_session(there, e, h), clock, idle_ns=1000)
    return pool, there, clock


def first(pool: SlotPool, slot: int = 0) -> SlotHandle:
    return pool.status()[slot].handle


def test_a_model_that_cannot_be_loaded_leaves_the_slot_empty() -> None:
    def load(model: str) -> ToyEngine:
        if model == "broken":
            raise EnvironmentProblem("broken: cannot be loaded")
        return ToyEngine(model)

    pool, world, _ = make(load=load)
    with pytest.raises(EnvironmentProblem):
        pool.load(first(pool), "broken")
    handle = pool.open(pool.load(first(pool), "good"))
    with pytest.raises(EnvironmentProblem):
        pool.switch(handle, "broken")
    status = pool.status()[0]
    assert (status.state, status.model) == (SlotState.EMPTY, None)
    with pytest.raises(StaleSlot):
        pool.open(handle)
    assert [e.closes for e in world.engines] == [1]
    with pool.acquire("good") as lease:
        lease.session.ensure_prefix([5])
    pool.close()


def test_a_context_that_cannot_be_opened_leaves_the_slot_loaded() -> None:
    pool, world, _ = make()
    handle = pool.load(first(pool), "a")
    world.engines[0].inner.open = refuse  # type: ignore[method-assign]
    with pytest.raises(EnvironmentProblem, match="no memory"):
        pool.open(handle)
    assert pool.status()[0].state is SlotState.LOADED
    del world.engines[0].inner.open  # type: ignore[attr-defined]
    pool.open(handle)
    pool.close()


def refuse(_: object) -> None:
    raise EnvironmentProblem("no memory for this context")


def test_an_engine_whose_device_is_lost_at_open_is_loaded_anew() -> None:
    pool, world, _ = make()
    handle = pool.load(first(pool), "a")

    def dead(_: object) -> None:
        raise EngineFault(FatalClass.DEVICE_LOST, "the host died")

    world.engines[0].inner.open = dead  # type: ignore[method-assign]
    with pytest.raises(EngineFault):
        pool.open(handle)
    status = pool.status()[0]
    assert status.state is SlotState.EMPTY
    assert status.fatal is not None
    assert (status.fatal.fatal_class, status.fatal.cause_message) == (FatalClass.DEVICE_LOST, "the host died")
    with pytest.raises(StaleSlot):
        pool.open(handle)
    with pool.acquire("a") as lease:
        lease.session.ensure_prefix([5, 6])
    assert len(world.engines) == 2
    pool.close()
    assert [e.closes for e in world.engines] == [1, 1]


def test_a_lost_device_is_not_given_to_others_and_is_closed_with_its_last_user() -> None:
    pool, world, _ = make(3)
    one, two = (pool.open(pool.load(first(pool, i), "a")) for i in (0, 1))
    assert len(world.engines) == 1
    with pytest.raises(SessionFatal), pool.lease(one) as lease:
        lose_device(lease.session)
    assert world.engines[0].closes == 0
    pool.load(first(pool, 2), "a")
    assert len(world.engines) == 2
    pool.unload(two)
    assert [e.closes for e in world.engines] == [1, 0]
    pool.close()
    assert world.violations == []


def test_a_log_that_cannot_be_written_frees_the_slot_all_the_same() -> None:
    pool, world, _ = make()
    handle = pool.open(pool.load(first(pool), "a"))

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    (sink,) = world.sinks.values()
    sink.record = broken  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        pool.unload(handle)
    assert pool.status()[0].state is SlotState.EMPTY
    assert [e.closes for e in world.engines] == [1]
    assert [b.closes for b in world.engines[0].backends] == [1]
    pool.close()


def test_the_close_event_says_why() -> None:
    pool, world, clock = make(3)
    handles = [pool.open(pool.load(first(pool, i), "a")) for i in range(3)]
    pool.switch(handles[0], "b")
    pool.unload(handles[1])
    clock.now += 1000
    pool.reap()
    reasons = [s.events[-1].reason for s in world.sinks.values() if s.events[-1].op is Op.CLOSE]
    assert reasons == ["switch", "unload", "idle"]
    pool.close()


def test_every_slot_in_use_is_a_typed_refusal_and_a_pool_in_use_closes_in_two_steps() -> None:
    pool, world, _ = make(1)
    with pool.acquire("a") as lease:
        with pytest.raises(NoFreeSlot, match="all 1 slots are in use"), pool.acquire("a"):
            pass
        with pytest.raises(SlotBusy, match=r"slots \[0\] are in use"):
            pool.close()
        lease.session.ensure_prefix([5])
    assert pool.status()[0].state is SlotState.IDLE
    pool.close()
    assert pool.status()[0].state is SlotState.EMPTY
    assert [b.closes for e in world.engines for b in e.backends] == [1]


@pytest.mark.parametrize(("n", "idle"), [(0, 5), (2, -1)])
def test_a_pool_needs_slots_and_a_time(n: int, idle: int) -> None:
    with pytest.raises(InputRejected):
        SlotPool(n, ToyEngine, lambda e, h: None, HandClock(), idle_ns=idle)  # type: ignore[arg-type, return-value]


def test_a_slot_that_is_not_there() -> None:
    pool, _, _ = make(2)
    with pytest.raises(InputRejected, match="no slot 7; this pool has 0 to 1"):
        pool.load(SlotHandle(7, 0), "a")


def test_threads_share_a_pool_and_never_a_session() -> None:
    """Eight threads, three slots, two models: whoever gets a slot has its session alone."""
    pool, world, _ = make(3)
    inside: dict[int, int] = {}
    wrong: list[str] = []
    failed: list[int] = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        start.wait()
        for i in range(30):
            try:
                with pool.acquire("ab"[(seed + i) % 2]) as lease:
                    alone(lease, fail=(seed + i) % 7 == 0)
            except SessionFatal:
                failed.append(seed)
            except NoFreeSlot:
                continue

    def alone(lease: Lease, *, fail: bool) -> None:
        slot = lease.handle.slot
        inside[slot] = inside.get(slot, 0) + 1
        try:
            if fail:
                lease.session._parts.backend.abort_next()  # type: ignore[attr-defined]
            lease.session.prefill_suffix([7, 8, 9])
            if inside[slot] != 1:
                wrong.append(f"slot {slot} is used twice")
        finally:
            inside[slot] -= 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    pool.close()
    assert wrong == []
    assert failed
    assert world.violations == []
    assert all(b.closes == 1 for e in world.engines for b in e.backends)
