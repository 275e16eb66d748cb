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

__all__ = ["Serving", "local_service", "memory_of_a_slot", "memory_of_slots"]


@dataclass(frozen=True, slots=True)
class Serving:
    """What is served, and how.

    `model`: its place; `model_name`: what clients call it. `config`: of each session, one a slot. `idle_s`: seconds
    after which a session that waits is closed; 0 for never. `template`: a chat template instead of the model's.
    """

    model: str
    model_name: str
    config: SessionConfig
    policy: PolicySpec
    slots: int = 1
    content: bool = False
    evict_by: str = "native"
    idle_s: float = 0.0
    limits: Limits | None = None
    template: str | None = None


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
    serving: Serving,
    run_id: str,
) -> Iterator[LocalService]:
    """A service whose sessions end with the block; the engine, of `serving.model`, is the caller's.

    The first session is opened at once, so that a configuration that cannot be opened is known before anybody asks.
    Raises what reading the model's vocabulary and opening the session raise, BadPrompt for a template that is none.
    """
    counted = CountingSink(sink)

    def open_session(loaded: Engine, handle: SlotHandle) -> Session:
        return Session(
            loaded.open(serving.config),
            serving.policy,
            counted,
            clock,
            run_id=run_id,
            session_id=f"slot{handle.slot}-{handle.generation}",
            content=serving.content,
            evict_by=serving.evict_by,
        )

    never = 2**62
    idle_ns = int(serving.idle_s * 1e9) or never
    pool = SlotPool(serving.slots, engine.load, open_session, clock, idle_ns=idle_ns)
    try:
        first = pool.open(pool.load(pool.status()[0].handle, serving.model))
        with pool.lease(first) as lease:
            # Positions go no further than the model was trained for, however many rows there is room for.
            n_ctx = min(lease.session.explain().n_ctx, engine.facts.n_ctx_train)
        service = LocalService(
            engine,
            Seats(pool, serving.model, may_branch=serving.policy.score_request is None),
            read_vocabulary(serving.model),
            counted,
            model_name=serving.model_name,
            n_ctx=n_ctx,
            slots=serving.slots,
            flush=sink.flush,
            limits=serving.limits,
            template=serving.template,
        )
        yield service
    finally:
        pool.close()
