"""A pool of slots: each holds one model and at most one session on it, and outlives what happens to that session.

    empty --load--> loaded --open--> idle <--lease--> leased
                      ^               |                  |
                      +----- reap ----+                  |
                      +----- fatal, closed --------------+     (empty when the device is lost)

    unload, switch: from loaded and idle

A slot's generation goes up with each of these but the lease and its end. A handle names slot and generation, so whoever
still has one of a session that is gone is refused with StaleSlot, and touches nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from kvtape.backends.engine_shelf import EngineShelf, LoadEngine
from kvtape.backends.errors import (
    EngineFault,
    FatalClass,
    InputRejected,
    NoFreeSlot,
    SessionClosed,
    SessionFatal,
    SlotBusy,
    StaleSlot,
)
from kvtape.backends.protocol import Clock, Engine
from kvtape.backends.session import Session
from kvtape.backends.slot import Lease, Slot, SlotHandle, SlotState, SlotStatus

__all__ = ["OpenSession", "SlotPool"]

OpenSession = Callable[[Engine, SlotHandle], Session]
"""Opens a session for a slot; slot and generation together make an id that never comes twice in a pool."""


class SlotPool:
    """`n_slots` slots over the engines that `load` gives; a session that waits for `idle_ns` may be reaped.

    Every method may be called from any thread. Slow work (loading, opening, closing) is done with the slot reserved
    and the pool free; who comes meanwhile is refused with SlotBusy instead of waiting. A change that fails half way
    (the old model is gone, the new one cannot be loaded) leaves the slot empty under a new generation.
    """

    def __init__(
        self, n_slots: int, load: LoadEngine, open_session: OpenSession, clock: Clock, *, idle_ns: int
    ) -> None:
        if n_slots < 1 or idle_ns < 0:
            raise InputRejected(
                f"{n_slots} slots, idle after {idle_ns} ns: a pool needs a slot, and a time of 0 or more"
            )
        self._shelf = EngineShelf(load)
        self._open_session = open_session
        self._clock = clock
        self._idle_ns = idle_ns
        self._lock = threading.RLock()
        self._slots = [Slot(i) for i in range(n_slots)]
        self._closed = False

    def status(self) -> tuple[SlotStatus, ...]:
        """Every slot as it is now."""
        with self._lock:
            now = self._clock.now_ns()
            return tuple(
                SlotStatus(s.handle, s.state, s.model, now - s.used_ns if s.state is SlotState.IDLE else None, s.fatal)
                for s in self._slots
            )

    # -- the life of a slot ---------------------------------------------------------------------------------------

    def load(self, handle: SlotHandle, model: str) -> SlotHandle:
        """Put `model` into an empty slot. Raises StaleSlot, SlotBusy, what loading raises."""
        with self._reserved(handle) as slot:
            if slot.engine is not None:
                raise SlotBusy(f"slot {slot.number} holds {slot.model}; switch it, or unload it first")
            self._fill(slot, model)
            return slot.handle

    def open(self, handle: SlotHandle) -> SlotHandle:
        """Open a session on the slot's model. Raises StaleSlot, SlotBusy, what opening raises.

        A refusal leaves the slot as it was; an EngineFault empties it.
        """
        with self._reserved(handle) as slot:
            if slot.engine is None or slot.session is not None:
                what = "no model; load one first" if slot.engine is None else "a session already"
                raise SlotBusy(f"slot {slot.number} holds {what}")
            self._begin(slot)
            return slot.handle

    @contextmanager
    def lease(self, handle: SlotHandle) -> Iterator[Lease]:
        """Use the slot's session alone. Raises StaleSlot, SlotBusy; what the body raises goes through.

        Where the session has ended by then, fatally or not, it is evicted and the slot's generation goes up.
        """
        with self._reserved(handle, SlotState.LEASED) as slot:
            if slot.session is None:
                raise SlotBusy(f"slot {slot.number} holds no session; open one first")
            with self._lent(slot) as lease:
                yield lease

    @contextmanager
    def acquire(self, model: str) -> Iterator[Lease]:
        """Lease any session on `model`: one that waits, else a new one where the model is loaded, else in an empty
        slot, else in place of the session that has waited longest.

        Raises NoFreeSlot when every slot is in use, what loading and opening raise; what the body raises goes through.
        """
        with ExitStack() as stack:
            with self._lock:
                free = [s for s in self._slots if s.reserved is None]
                if not free:
                    raise NoFreeSlot(f"all {len(self._slots)} slots are in use; give one back or make the pool larger")
                best = min(free, key=lambda s: s.cost_for(model))
                slot = stack.enter_context(self._reserved(best.handle))
            self._prepare(slot, model)
            slot.reserved = SlotState.LEASED
            yield stack.enter_context(self._lent(slot))

    def reap(self) -> tuple[SlotHandle, ...]:
        """Close every session that has waited for `idle_ns`; the models stay loaded. Gives the slots' new handles."""
        now = self._clock.now_ns()
        reaped: list[SlotHandle] = []
        for number in range(len(self._slots)):
            with ExitStack() as stack:
                with self._lock:
                    slot = self._slots[number]
                    if slot.state is not SlotState.IDLE or now - slot.used_ns < self._idle_ns:
                        continue
                    stack.enter_context(self._reserved(slot.handle))
                self._end(slot, "idle")
                reaped.append(slot.handle)
        return tuple(reaped)

    def switch(self, handle: SlotHandle, model: str) -> SlotHandle:
        """Close what the slot holds and put `model` in its place, without a session yet."""
        with self._reserved(handle) as slot:
            self._clear(slot, "switch")
            self._fill(slot, model)
            return slot.handle

    def unload(self, handle: SlotHandle) -> SlotHandle:
        """Empty the slot; the engine is closed when no other slot uses it."""
        with self._reserved(handle) as slot:
            self._clear(slot, "unload")
            return slot.handle

    def close(self) -> None:
        """Empty every slot; nothing but `status` and `close` works afterwards.

        Raises SlotBusy for slots that are in use, with the others emptied; call it again once they are given back.
        """
        with self._lock:
            self._closed = True
        busy: list[int] = []
        for number in range(len(self._slots)):
            with ExitStack() as stack:
                with self._lock:
                    slot = self._slots[number]
                    if slot.reserved is not None:
                        busy.append(number)
                        continue
                    stack.enter_context(self._reserved(slot.handle, closing=True))
                self._clear(slot, "asked")
        if busy:
            raise SlotBusy(f"slots {busy} are in use; give them back, then close again")

    # -- who may work on a slot -----------------------------------------------------------------------------------

    @contextmanager
    def _reserved(
        self, handle: SlotHandle, state: SlotState = SlotState.CHANGING, *, closing: bool = False
    ) -> Iterator[Slot]:
        with self._lock:
            if self._closed and not closing:
                raise SessionClosed("the pool was closed")
            slot = self._current(handle)
            if slot.reserved is not None:
                raise SlotBusy(f"slot {slot.number} is {slot.reserved}; wait, or take another")
            slot.reserved = state
        try:
            yield slot
        finally:
            with self._lock:
                slot.reserved = None

    def _current(self, handle: SlotHandle) -> Slot:
        """The slot, if the handle is of its present life."""
        if not 0 <= handle.slot < len(self._slots):
            raise InputRejected(f"no slot {handle.slot}; this pool has 0 to {len(self._slots) - 1}")
        slot = self._slots[handle.slot]
        if slot.generation != handle.generation:
            raise StaleSlot(handle.slot, handle.generation, slot.generation)
        return slot

    @contextmanager
    def _lent(self, slot: Slot) -> Iterator[Lease]:
        session = slot.session
        assert session is not None
        if session.ended:  # somebody kept it beyond a lease and closed it
            handle = slot.handle
            self._evict(slot)
            raise StaleSlot(handle.slot, handle.generation, slot.generation)
        lease = Lease(slot.handle, session)
        try:
            yield lease
        finally:
            lease.end()
            slot.used_ns = self._clock.now_ns()
            if session.ended:
                self._evict(slot)

    # -- steps, on a reserved slot --------------------------------------------------------------------------------

    def _prepare(self, slot: Slot, model: str) -> None:
        if slot.model != model:
            if slot.engine is not None:
                self._clear(slot, "switch")
            self._fill(slot, model)
        elif slot.session is not None and slot.session.ended:
            self._evict(slot)
        if slot.engine is None:  # its device was lost
            self._fill(slot, model)
        if slot.session is None:
            self._begin(slot)

    def _fill(self, slot: Slot, model: str) -> None:
        slot.engine = self._shelf.take(model)
        slot.model = model
        slot.generation += 1

    def _begin(self, slot: Slot) -> None:
        assert slot.engine is not None
        try:
            session = self._open_session(slot.engine, SlotHandle(slot.number, slot.generation + 1))
        except EngineFault as fault:
            slot.fatal = SessionFatal(fault.fatal_class, fault.cause)
            self._shelf.condemn(slot.engine)
            self._clear(slot, "fatal")
            raise
        slot.session, slot.fatal, slot.used_ns = session, None, self._clock.now_ns()
        slot.generation += 1

    def _evict(self, slot: Slot) -> None:
        """The session ended: it goes, and where the device is lost the engine with it."""
        assert slot.session is not None
        slot.fatal = slot.session.fatal
        if slot.fatal is not None and slot.fatal.fatal_class is FatalClass.DEVICE_LOST:
            assert slot.engine is not None
            self._shelf.condemn(slot.engine)
            self._clear(slot, "fatal")
        else:
            self._end(slot, "asked")

    def _end(self, slot: Slot, reason: str) -> None:
        """Close the session, whatever closing raises; the slot forgets it first, so nobody finds it half closed."""
        session, slot.session = slot.session, None
        slot.generation += 1
        if session is not None:
            session.close(reason)

    def _clear(self, slot: Slot, reason: str) -> None:
        engine, slot.engine, slot.model = slot.engine, None, None
        try:
            self._end(slot, reason)
        finally:
            if engine is not None:
                self._shelf.give_back(engine)
