"""Every cell of the fault matrix that can happen: first cause, no later use, freed once, a slot that opens again."""

from __future__ import annotations

import functools
import inspect
import re
import runpy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtape.backends.errors import FatalClass, SessionFatal, StaleSlot
from kvtape.backends.llama.session import LlamaBackend
from kvtape.backends.protocol import Engine
from kvtape.backends.reference.session.backend import ReferenceBackend
from kvtape.backends.slot import SlotHandle, SlotState
from kvtape.backends.slots import SlotPool
from kvtape.planner.events import Op
from kvtape.planner.ranges import RangeSet
from kvtape.planner.residency import fold
from kvtape.testing.sink import ListSink
from support.engines import ENGINES, load_engine
from support.fault_plays import PLAYS, PROMPT, start
from support.fault_table import CELLS, OPERATIONS, Fault, Key
from support.repository import ROOT
from support.slot_machine import HandClock
from support.tiny_gguf import write_tiny
from support.watched import WatchedEngine

pytestmark = pytest.mark.contract("I1")

_folder = tempfile.TemporaryDirectory(prefix="kvtape-faults-")
LIVE_CELLS = [key for key, cell in CELLS.items() if cell.provoke is not None]


@functools.cache
def model() -> Path:
    return write_tiny(Path(_folder.name) / "llama.gguf", "llama")


@functools.cache
def engine(name: str) -> Engine:
    return load_engine(name, model())


class Kept:
    """An engine that outlives a pool."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def close(self) -> None:
        pass


def native_alive(backend: Any) -> bool:
    inner = backend.inner
    if inner.name == "reference":
        return inner._carrier is not None
    return inner._context._free.alive if inner.name == "llama" else inner._state._runner is not None


def test_the_matrix_is_complete() -> None:
    """Every class x engine x operation has its cell; what cannot happen says why, what can is run below."""
    assert set(CELLS) == {(f, e, o) for f in FatalClass for e in ENGINES for o in OPERATIONS}
    for (fatal, name, operation), cell in CELLS.items():
        assert cell.how in ("provoked", "injected", "cannot happen"), (fatal, name, operation)
        assert cell.what
        assert (cell.provoke is None) == (cell.how == "cannot happen")
    for fatal in FatalClass:
        assert any(CELLS[fatal, e, o].how == "provoked" for e in ENGINES for o in OPERATIONS), fatal


def test_the_page_is_what_the_table_says() -> None:
    page = (ROOT / "docs/contract.md").read_text(encoding="utf-8")
    writer = runpy.run_path(str(ROOT / "docs/write_contract.py"))
    for part in writer["PARTS"].values():
        assert part() in page, "write the page anew with: make docs"


DECLARES = re.compile(r"FatalClass\.([A-Z_]+)")


@pytest.mark.parametrize("kind", [LlamaBackend, ReferenceBackend], ids=lambda kind: kind.name)
@pytest.mark.parametrize("operation", PLAYS)
def test_what_an_operation_declares_is_no_cell_that_cannot_happen(
    operation: str, kind: type[LlamaBackend | ReferenceBackend]
) -> None:
    """The source of the operations names the class of their failures."""
    declared = {FatalClass[name] for name in DECLARES.findall(inspect.getsource(getattr(kind, operation)))}
    assert declared
    for fatal in declared:
        cell = CELLS[fatal, kind.name, operation]
        assert cell.how != "cannot happen", (operation, fatal)


@pytest.mark.contract("I1", cell=True)
@pytest.mark.parametrize("key", LIVE_CELLS, ids=lambda k: f"{k[1]}-{k[2]}-{k[0]}")
def test_a_failure_ends_the_session_and_nothing_else(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    fatal, name, operation = key
    cell, play = CELLS[key], PLAYS[operation]
    violations: list[str] = []
    sinks: dict[SlotHandle, ListSink] = {}

    def open_session(opened: Engine, handle: SlotHandle) -> Any:
        sink = sinks[handle] = ListSink()
        return start(play, opened.open(play.config), f"s{handle.generation}", sink)

    lost = fatal is FatalClass.DEVICE_LOST

    def load(_: str) -> Any:
        # A model that cannot be made again is of no more use to other tests.
        inner: Any = load_engine(name, model()) if lost else Kept(engine(name))
        return WatchedEngine(inner, violations)

    pool = SlotPool(2, load, open_session, HandClock(), idle_ns=1)
    one, two = (pool.open(pool.load(pool.status()[i].handle, "m")) for i in (0, 1))
    with pool.lease(one) as lease:
        session = lease.session
        backend: Any = session._parts.backend
        with monkeypatch.context() as patch:
            assert cell.provoke is not None
            cell.provoke(Fault(session, backend.inner, operation, len(cell.what) + OPERATIONS.index(operation), patch))
            with pytest.raises(SessionFatal) as first:
                play.act(session)
        assert first.value.fatal_class is fatal
        assert re.search(cell.cause, first.value.cause_message)
        calls = len(backend.calls)
        for other in PLAYS.values():
            with pytest.raises(SessionFatal) as again:
                other.act(session) if other is not PLAYS["admit"] else session.admit(0)
            assert (again.value.fatal_class, again.value.cause_message) == (fatal, first.value.cause_message)
        assert len(backend.calls) == calls, "a later call reached the engine"
    events = sinks[one].events
    assert [e.op for e in events if e.op in (Op.FATAL, Op.CLOSE)] == [Op.FATAL, Op.CLOSE]
    told = next(e for e in events if e.op is Op.FATAL)
    assert (told.error_class, told.reason) == (str(fatal), first.value.cause_message)
    assert fold(events).fatal is not None
    assert backend.closes == 1
    assert not native_alive(backend)
    with pytest.raises(StaleSlot), pool.lease(one):
        pass
    status = pool.status()[0]
    assert status.handle.generation > one.generation
    assert status.state is (SlotState.EMPTY if lost else SlotState.LOADED)
    assert status.fatal is not None
    assert status.fatal.fatal_class is fatal
    _opens_again(pool, name, status.handle, empty=lost)
    if not lost:
        with pool.lease(two) as sibling:
            play.act(sibling.session)
    pool.close()
    assert not violations


def _opens_again(pool: SlotPool, name: str, handle: SlotHandle, *, empty: bool) -> None:
    """The slot's next session is a fresh context that computes what any fresh one does."""
    again = pool.open(pool.load(handle, "m") if empty else handle)
    with pool.lease(again) as lease:
        lease.session.ensure_prefix([*PROMPT[:20], 3])
        backend: Any = lease.session._parts.backend
        fresh = engine(name).open(lease.session._parts.backend.config)
        for b in (backend, fresh):
            b.rebuild(RangeSet(), [])
        np.testing.assert_array_equal(backend.prefill(PROMPT, 0).logits, fresh.prefill(PROMPT, 0).logits)
        fresh.close()
