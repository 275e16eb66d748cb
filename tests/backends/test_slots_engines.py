"""SlotPool over both real engines: the same machine as over the toy, and a slot's way back after each kind of end."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvtape.backends.errors import SessionFatal, StaleSlot
from kvtape.backends.protocol import Engine, SessionConfig
from kvtape.backends.slot import SlotHandle, SlotState
from kvtape.backends.slots import SlotPool
from support.engines import ENGINES, load_engine
from support.slot_machine import HandClock, SlotMachine, World, open_slot_session
from support.tiny_gguf import write_tiny

pytestmark = pytest.mark.contract("I1")

_folder = tempfile.TemporaryDirectory(prefix="kvtape-slots-")
ARCHS = {"a": "llama", "b": "qwen2"}
CONFIG = SessionConfig(n_ctx=256, chunk=64, kv_type_k="f32", kv_type_v="f32", cold_budget_tokens=64)


@functools.cache
def model_file(model: str) -> Path:
    return write_tiny(Path(_folder.name) / f"{model}.gguf", ARCHS[model])


@functools.cache
def compiled(model: str) -> Engine:
    """OpenVINO compiles for a third of a second, so its engines stay; that they are closed right is llama's part."""
    return load_engine("openvino", model_file(model))


class Kept:
    """An engine that outlives the pool."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def close(self) -> None:
        pass


def world_on(name: str) -> World:
    def load(model: str) -> Any:
        return load_engine(name, model_file(model)) if name == "llama" else Kept(compiled(model))

    return World(load=load, config=CONFIG)


@pytest.mark.parametrize("name", ENGINES)
def test_any_order_of_events_on_a_real_engine(name: str) -> None:
    class Machine(SlotMachine):
        def world_of(self) -> World:
            return world_on(name)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def make(name: str, n_slots: int = 2) -> tuple[SlotPool, World, HandClock]:
    world, clock = world_on(name), HandClock()
    pool = SlotPool(n_slots, world.load_watched, lambda e, h: open_slot_session(world, e, h), clock, idle_ns=1000)
    return pool, world, clock


def ready(pool: SlotPool, slot: int, model: str) -> SlotHandle:
    return pool.open(pool.load(pool.status()[slot].handle, model))


def native_alive(backend: Any) -> bool:
    """Whether the engine still holds a context for this session."""
    inner = backend.inner
    return inner._context._free.alive if inner.name == "llama" else inner._state._runner is not None


@pytest.mark.parametrize("name", ENGINES)
def test_after_a_fatal_the_slot_reopens_with_a_fresh_context_and_a_sibling_never_noticed(name: str) -> None:
    pool, world, _ = make(name)
    one, two = ready(pool, 0, "a"), ready(pool, 1, "a")
    prompt = [int(t) for t in np.random.default_rng(3).integers(3, 259, 40)]
    with pool.lease(two) as sibling:
        sibling.session.ensure_prefix(prompt)
    with pool.lease(one) as lease:
        lease.session.ensure_prefix(prompt)
        failed: Any = lease.session._parts.backend
        failed.abort_next()
        with pytest.raises(SessionFatal):
            lease.session.decode(3)
    assert not native_alive(failed)
    status = pool.status()[0]
    assert (status.state, status.fatal and status.fatal.fatal_class) == (SlotState.LOADED, "decode_failed")
    with pytest.raises(StaleSlot):
        pool.open(one)
    again = pool.open(status.handle)
    assert again.generation > one.generation
    with pool.lease(again) as fresh, pool.lease(two) as sibling:
        fresh.session.ensure_prefix(prompt)
        said = [s.session.decode(5, stop_tokens=frozenset()).tokens for s in (fresh, sibling)]
        assert said[0] == said[1]
        np.testing.assert_array_equal(fresh.session.logits, sibling.session.logits)
    pool.close()
    assert not world.violations


@pytest.mark.parametrize("name", ENGINES)
def test_a_switch_frees_the_old_model_s_context_and_opens_the_other_model(name: str) -> None:
    pool, world, _ = make(name, 1)
    handle = ready(pool, 0, "a")
    with pool.lease(handle) as lease:
        old: Any = lease.session._parts.backend
        lease.session.ensure_prefix([5, 6, 7])
    with pool.acquire("b") as lease:
        assert not native_alive(old)
        assert lease.session._parts.backend.facts.arch == "qwen2"
        assert lease.session.tape == ()
        lease.session.ensure_prefix([5, 6, 7])
    with pytest.raises(StaleSlot), pool.lease(handle):
        pass
    assert [(e.facts.arch, e.closes) for e in world.engines] == [("llama", 1), ("qwen2", 0)]
    pool.close()


@pytest.mark.parametrize("name", ENGINES)
def test_an_idle_session_is_reaped_and_its_context_freed(name: str) -> None:
    pool, _, clock = make(name, 1)
    handle = ready(pool, 0, "a")
    with pool.lease(handle) as lease:
        backend: Any = lease.session._parts.backend
        lease.session.ensure_prefix([5, 6, 7])
        clock.now += 5000
        assert pool.reap() == (), "what is in use is not idle"
    clock.now += 999
    assert pool.reap() == ()
    clock.now += 1
    (reaped,) = pool.reap()
    assert not native_alive(backend)
    with pytest.raises(StaleSlot), pool.lease(handle):
        pass
    with pool.lease(pool.open(reaped)) as lease:
        assert lease.session.tape == ()
    pool.close()
