"""A service made of its parts: engine, pool, seats, line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvtape.backends.protocol import Clock, Engine, EventSink, SessionConfig
from kvtape.backends.session import Session
from kvtape.backends.slot import SlotHandle
from kvtape.backends.slots import SlotPool
from kvtape.capacity.sizes import parse_size
from kvtape.planner.specs import PolicySpec
from kvtape.serve.counting import CountingSink
from kvtape.serve.engines import SharedEngine
from kvtape.serve.local import Limits, LocalService
from kvtape.serve.seats import Seats
from kvtape.serve.vocabulary import read_vocabulary

__all__ = ["Sessions", "local_service", "memory_of_a_slot", "memory_of_slots"]


@dataclass(frozen=True, slots=True)
class Sessions:
    """How a server's sessions are opened. `idle_s`: seconds after which one that waits is closed; 0 for never."""

    config: SessionConfig
    policy: PolicySpec
    run_id: str
    content: bool = False
    evict_by: str = "native"
    idle_s: float = 0.0


def memory_of_a_slot(memory: str, weights: int, slots: int) -> str:
    """What the option `memory` of one of `slots` sessions is, when all of them and the weights share `memory`.

    `auto` and `off` stay what they are. Raises CapacityError for what is no size.
    """
    if memory in ("auto", "off"):
        return memory
    whole = parse_size(memory)
    return str(whole if whole <= weights else weights + (whole - weights) // slots)


def memory_of_slots(least: int, weights: int, slots: int) -> int:
    """Bytes that leave `least` as the `memory_of_a_slot`: the weights once, and what is beside them for each slot."""
    return weights + slots * (least - weights)


@contextmanager
def local_service(
    engine: SharedEngine,
    sink: EventSink,
    clock: Clock,
    sessions: Sessions,
    *,
    slots: int,
    model: str,
    model_name: str,
    limits: Limits | None = None,
    template: str | None = None,
) -> Iterator[LocalService]:
    """A service whose sessions end with the block; the engine is the caller's.

    The first session is opened at once, so that a configuration that cannot be opened is known before anybody asks.
    Raises what reading the model's vocabulary and opening the session raise, BadPrompt for a template that is none.
    """
    counted = CountingSink(sink)

    def open_session(loaded: Engine, handle: SlotHandle) -> Session:
        return Session(
            loaded.open(sessions.config),
            sessions.policy,
            counted,
            clock,
            run_id=sessions.run_id,
            session_id=f"slot{handle.slot}-{handle.generation}",
            content=sessions.content,
            evict_by=sessions.evict_by,
        )

    never = 2**62
    idle_ns = int(sessions.idle_s * 1e9) or never
    pool = SlotPool(slots, engine.load, open_session, clock, idle_ns=idle_ns)
    try:
        first = pool.open(pool.load(pool.status()[0].handle, model))
        with pool.lease(first) as lease:
            # Positions go no further than the model was trained for, however many rows there is room for.
            n_ctx = min(lease.session.explain().n_ctx, engine.facts.n_ctx_train)
        service = LocalService(
            engine,
            Seats(pool, model, may_branch=sessions.policy.score_request is None),
            read_vocabulary(model),
            counted,
            model_name=model_name,
            n_ctx=n_ctx,
            slots=slots,
            flush=sink.flush,
            limits=limits,
            template=template,
        )
        yield service
    finally:
        pool.close()
