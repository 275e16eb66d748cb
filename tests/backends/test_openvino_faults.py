"""Failures of the engine itself: real ones, what they cost the session, and what they must not cost its siblings."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtape.backends.errors import Cancelled, EngineFault, FatalClass, KvtapeError
from kvtape.backends.openvino.compiled import Compiled
from kvtape.backends.openvino.engine import OpenVinoEngine
from kvtape.backends.openvino.runner import Runner, StateFailed
from kvtape.backends.openvino.session import OpenVinoBackend
from kvtape.backends.protocol import SessionConfig
from kvtape.planner.layout import Segment
from kvtape.planner.ranges import RangeSet
from support.openvino_tiny import MODELS, assert_whole, same_rows, tiny_path, tiny_session, tokens
from support.tiny_gguf import write_tiny

OPTIONS: list[dict[str, str]] = [{}, {"mirror": "off"}, {"kv": "asked"}, {"kv": "asked", "mirror": "off"}]


@pytest.fixture
def engine() -> OpenVinoEngine:
    """An engine of its own, so that a poisoned compiled model meets no other test."""
    return OpenVinoEngine.load(tiny_path("llama"))


def open_session(engine: OpenVinoEngine, **config: Any) -> OpenVinoBackend:
    return engine.open(SessionConfig(**{"n_ctx": 512, "chunk": 16, "cold_budget_tokens": 64} | config))


def greedy(logits: np.ndarray) -> int:
    return int(logits.argmax())


def assert_dead(backend: OpenVinoBackend, fatal: FatalClass) -> None:
    calls: list[Callable[[], object]] = [
        lambda: backend.prefill([4], 400),
        lambda: backend.truncate(0),
        lambda: backend.restore(b""),
        backend.snapshot,
        backend.witness,
        backend.books,
        backend.kv_bytes,
    ]
    for call in calls:
        with pytest.raises(EngineFault) as caught:
            call()
        assert caught.value.fatal_class is fatal
    backend.close()


def test_a_failed_decode_kills_the_session_with_its_first_cause(engine: OpenVinoEngine) -> None:
    backend = open_session(engine)
    logits = backend.prefill(tokens(20), 0).logits
    backend.abort_next()
    with pytest.raises(EngineFault, match=r"decode_failed: .*attention_mask") as caught:
        backend.decode_until(4, 512, 20, logits, greedy)
    assert caught.value.fatal_class is FatalClass.DECODE_FAILED
    assert isinstance(caught.value.__cause__.__cause__, RuntimeError)  # type: ignore[union-attr]
    assert_dead(backend, FatalClass.DECODE_FAILED)
    assert_dead(backend, FatalClass.DECODE_FAILED)


ATTEMPTS: dict[str, tuple[FatalClass, Callable[[OpenVinoBackend], object]]] = {
    "prefill": (FatalClass.PREFILL_FAILED, lambda b: b.prefill(tokens(20), 20)),
    "rebuild": (FatalClass.PREFILL_FAILED, lambda b: b.rebuild(RangeSet([(0, 4)]), tokens(4))),
    "refill": (FatalClass.PREFILL_FAILED, lambda b: b.refill(tokens(4), 30, 30)),
    "evict": (FatalClass.STATE_RESTORE_FAILED, lambda b: b.evict(3, 5)),
    "truncate": (FatalClass.STATE_RESTORE_FAILED, lambda b: b.truncate(5)),
    "shift": (FatalClass.STATE_RESTORE_FAILED, lambda b: b.shift(3, 20, 2)),
}


@pytest.mark.parametrize("operation", ATTEMPTS)
def test_every_engine_call_that_fails_is_final(engine: OpenVinoEngine, operation: str) -> None:
    fatal, attempt = ATTEMPTS[operation]
    backend = open_session(engine)
    backend.prefill(tokens(20), 0)
    backend.abort_next()
    with pytest.raises(EngineFault):
        attempt(backend)
    assert_dead(backend, fatal)


def test_a_failed_restore_kills_the_session_only(engine: OpenVinoEngine) -> None:
    backend, sibling = open_session(engine), open_session(engine)
    for b in (backend, sibling):
        b.prefill(tokens(20), 0)
    before = sibling.witness()
    saved = backend.snapshot()
    backend.abort_next()
    with pytest.raises(EngineFault, match="state_restore_failed") as caught:
        backend.restore(saved)
    assert isinstance(caught.value.__cause__, StateFailed)
    assert_dead(backend, FatalClass.STATE_RESTORE_FAILED)
    np.testing.assert_array_equal(before.rows.keys[0], sibling.witness().rows.keys[0])
    sibling.restore(saved)
    assert_whole(sibling)


@pytest.mark.parametrize("options", OPTIONS)
def test_siblings_go_on_bit_by_bit(engine: OpenVinoEngine, options: dict[str, str]) -> None:
    """One session fails; the others, moved rows included, continue as if nothing had happened."""
    sibling, twin = open_session(engine, options=options), tiny_session(options=options)
    logits = []
    for b in (sibling, twin):
        logits.append(b.prefill(tokens(40), 0).logits)
        if b.capabilities.position_shift:
            b.evict(10, 20)
            b.shift(20, 40, -10)
    victim = open_session(engine, options=options)
    victim.prefill(tokens(40, seed=3), 0)
    compiled = sibling._state.compiled
    victim.abort_next()
    with pytest.raises(EngineFault):
        victim.prefill(tokens(3), 40)
    assert compiled.imports == 1
    assert sibling._state.compiled is compiled
    assert same_rows(sibling, twin)
    runs = [b.decode_until(20, 512, 40, logits[0], greedy) for b in (sibling, twin)]
    assert runs[0].tokens == runs[1].tokens
    np.testing.assert_array_equal(runs[0].logits, runs[1].logits)
    assert same_rows(sibling, twin)
    late = open_session(engine, options=options)
    np.testing.assert_array_equal(late.prefill(tokens(40), 0).logits, logits[0])


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_model_that_was_made_again_computes_what_it_did(name: str) -> None:
    """Not all survive an export and import: the RoPE of qwen2 and qwen3 comes back with half its keys unwritten."""
    engine = OpenVinoEngine.load(tiny_path(name))
    sibling, twin = open_session(engine), tiny_session(name)
    for b in (sibling, twin):
        b.prefill(tokens(30), 0)
    for turn in range(3):
        victim = open_session(engine)
        victim.prefill(tokens(9), 0)
        victim.abort_next()
        with pytest.raises(EngineFault):
            victim.prefill(tokens(3), 9)
        results = [b.prefill(tokens(20, seed=turn), 30 + 20 * turn).logits for b in (sibling, twin)]
        np.testing.assert_array_equal(results[0], results[1])
        assert same_rows(sibling, twin)
        late, other = open_session(engine), tiny_session(name)
        np.testing.assert_array_equal(late.prefill(tokens(25), 0).logits, other.prefill(tokens(25), 0).logits)
        assert same_rows(late, other)
    assert sibling._state.compiled.imports == 3


def test_an_import_that_computes_otherwise_is_not_used(engine: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sibling, twin = open_session(engine), tiny_session()
    for b in (sibling, twin):
        b.prefill(tokens(30), 0)
    compiled = sibling._state.compiled
    assert compiled._blob is not None
    # The blob of another model of the same shape: it imports, and computes something else.
    other = OpenVinoEngine.load(write_tiny(Path(tiny_path("llama")).with_name("other.gguf"), "llama", seed=1))
    monkeypatch.setattr(compiled, "_blob", open_session(other)._state.compiled._blob)
    victim = open_session(engine)
    victim.abort_next()
    with pytest.raises(EngineFault):
        victim.prefill(tokens(3), 0)
    assert compiled._blob is None
    np.testing.assert_array_equal(sibling.prefill(tokens(5), 30).logits, twin.prefill(tokens(5), 30).logits)


def test_many_failures_in_a_row_cost_nobody_else(engine: OpenVinoEngine) -> None:
    sibling, twin = open_session(engine), tiny_session()
    for b in (sibling, twin):
        b.prefill(tokens(33), 0)
    for n in (1, 7, 16, 33):
        victim = open_session(engine)
        victim.prefill(tokens(n), 0)
        victim.abort_next()
        with pytest.raises(EngineFault):
            victim.prefill(tokens(n), n)
        for b in (sibling, twin):
            b.prefill(tokens(n, seed=n), 100 + 100 * n)
        assert same_rows(sibling, twin)


def test_when_the_model_cannot_come_back_all_are_stranded(
    engine: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sibling, victim = open_session(engine), open_session(engine)
    for b in (sibling, victim):
        b.prefill(tokens(9), 0)
    compiled = victim._state.compiled
    monkeypatch.setattr(compiled, "_blob", compiled._blob[:100])
    victim.abort_next()
    with pytest.raises(EngineFault, match="prefill_failed"):
        victim.prefill(tokens(3), 9)
    assert_dead(victim, FatalClass.PREFILL_FAILED)
    assert_dead(sibling, FatalClass.DEVICE_LOST)
    with pytest.raises(KvtapeError, match="cannot open a session"):
        open_session(engine)
    monkeypatch.undo()
    open_session(engine).prefill(tokens(3), 0)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> OpenVinoEngine:
    """A model whose prefill takes long enough to be stopped in the middle of a call."""
    path: Path = tmp_path_factory.mktemp("slow") / "slow.gguf"
    write_tiny(path, n_layer=6, n_embd=256, n_head=8, n_head_kv=4, n_ff=1024)
    return OpenVinoEngine.load(path)


class StopAtStep:
    """Asks for a cancel once the engine is at work on the n-th call: from its own thread, while the caller waits."""

    def __init__(self, backend: OpenVinoBackend, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
        self.calls = 0
        original = Runner._run

        def run(runner: Runner, feed: dict[str, Any], stop: Callable[[], bool]) -> None:
            self.calls += 1
            if self.calls == nth:
                threading.Timer(0.01, backend.cancel).start()
            original(runner, feed, stop)

        monkeypatch.setattr(Runner, "_run", run)


@pytest.mark.parametrize("options", [{}, {"mirror": "off"}])
@pytest.mark.parametrize("operation", ["prefill", "rebuild", "decode"])
def test_a_cancel_takes_back_the_operation(
    slow: OpenVinoEngine, options: dict[str, str], operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, sibling, twin = (slow.open(SessionConfig(n_ctx=4096, chunk=1024, options=options)) for _ in range(3))
    ids = tokens(3000)
    for b in (backend, sibling, twin):
        logits = b.prefill(ids[:30], 0).logits
    attempts: dict[str, Callable[[], object]] = {
        "prefill": lambda: backend.prefill(ids, 30),
        "rebuild": lambda: backend.rebuild(RangeSet([(0, 3000)]), ids),
        "decode": lambda: backend.decode_until(2000, 4096, 30, logits, greedy),
    }
    imports = backend._state.compiled.imports
    stopper = StopAtStep(backend, monkeypatch, 2)
    with pytest.raises(Cancelled):
        attempts[operation]()
    monkeypatch.undo()
    assert stopper.calls >= 2
    # A decode step may end before the stop is seen; a prefill of 1024 tokens cannot.
    assert backend._state.compiled.imports == imports + 1 or operation == "decode"
    for b in (backend, sibling):
        assert b.books() == (Segment(0, 30, 0),)
        assert same_rows(b, twin)
    results = [b.prefill(ids[30:60], 30).logits for b in (backend, sibling, twin)]
    np.testing.assert_array_equal(results[0], results[2])
    np.testing.assert_array_equal(results[1], results[2])


def test_a_cancel_between_operations_stops_the_next_one_once(engine: OpenVinoEngine) -> None:
    backend, twin = open_session(engine), tiny_session()
    for b in (backend, twin):
        b.prefill(tokens(20), 0)
    attempts: list[Callable[[], object]] = [
        lambda: backend.prefill([5], 20),
        lambda: backend.evict(3, 5),
        lambda: backend.shift(5, 20, 2),
        backend.snapshot,
    ]
    for attempt in attempts:
        backend.cancel()
        with pytest.raises(Cancelled):
            attempt()
        assert same_rows(backend, twin)
    backend.evict(3, 5)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_exception_of_the_caller_takes_back_the_run(engine: OpenVinoEngine, error: type[BaseException]) -> None:
    backend, twin = open_session(engine), tiny_session()
    for b in (backend, twin):
        logits = b.prefill(tokens(20), 0).logits
    left = iter([7, 8, 9])

    def choose(_logits: np.ndarray) -> int:
        token = next(left, None)
        if token is None:
            raise error
        return token

    with pytest.raises(error):
        backend.decode_until(9, 512, 20, logits, choose)
    assert backend.books() == (Segment(0, 20, 0),)
    assert same_rows(backend, twin)
    np.testing.assert_array_equal(backend.prefill([5], 20).logits, twin.prefill([5], 20).logits)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, *calls: int) -> None:
    """Ctrl-C while the engine is at work on these of the calls from now on."""
    original, n = Runner._run, itertools.count(1)

    def interrupted(runner: Runner, feed: dict[str, Any], stop: Callable[[], bool]) -> None:
        wanted = next(n) in calls

        def poll() -> bool:
            if wanted:
                raise KeyboardInterrupt
            return stop()

        original(runner, feed, poll)
        if wanted:  # the engine was done before anybody looked
            raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "_run", interrupted)


def test_an_interrupt_while_the_engine_works_takes_back_the_operation(
    slow: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, twin = (slow.open(SessionConfig(n_ctx=4096, chunk=1024)) for _ in range(2))
    for b in (backend, twin):
        b.prefill(tokens(30), 0)
    interrupt_at(monkeypatch, 1)
    imports = backend._state.compiled.imports
    with pytest.raises(KeyboardInterrupt):
        backend.prefill(tokens(1024), 30)
    monkeypatch.undo()
    assert backend._state.compiled.imports == imports + 1
    assert same_rows(backend, twin)


def test_an_interrupt_while_another_is_dealt_with_loses_the_sessions_and_says_so(
    slow: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes while the fresh model is tried out: no session may go on with a request of the old one."""
    backend, twin = (slow.open(SessionConfig(n_ctx=4096, chunk=1024)) for _ in range(2))
    for b in (backend, twin):
        b.prefill(tokens(30), 0)
    interrupt_at(monkeypatch, 1, 2)
    with pytest.raises(KeyboardInterrupt):
        backend.prefill(tokens(1024), 30)
    monkeypatch.undo()
    for b in (backend, twin):
        with pytest.raises(EngineFault, match="device_lost"):
            b.witness()
    after = slow.open(SessionConfig(n_ctx=64))
    after.prefill(tokens(30), 0)
    assert_whole(after)


def test_states_of_a_wrong_shape_or_type_never_reach_the_engine() -> None:
    backend = tiny_session()
    backend.prefill(tokens(6), 0)
    runner, rows = backend._state._runner, backend._state.rows
    assert runner is not None
    for keys, values in (
        (rows.keys[:1], rows.values[:1]),
        (rows.keys, rows.values[:, :4]),
        (rows.keys.astype(np.float64), rows.values.astype(np.float64)),
        (np.repeat(rows.keys, 2, axis=2), rows.values),
    ):
        with pytest.raises(StateFailed):
            runner.load(keys, values)
    assert_whole(backend)


def test_rows_out_of_step_are_noticed(engine: OpenVinoEngine) -> None:
    """A state that lost a row behind our back."""
    backend = open_session(engine)
    backend.prefill(tokens(12), 0)
    assert backend._state._runner is not None
    backend._state._runner.load(backend._state.rows.keys[:, :11], backend._state.rows.values[:, :11])
    with pytest.raises(EngineFault):
        backend.prefill([5], 12)


def test_a_session_that_is_gone_is_not_carried(engine: OpenVinoEngine) -> None:
    closed, victim = open_session(engine), open_session(engine)
    compiled: Compiled = closed._state.compiled
    closed.close()
    victim.prefill(tokens(4), 0)
    victim.abort_next()
    with pytest.raises(EngineFault):
        victim.prefill([4], 4)
    assert compiled._passengers == []


def test_running_out_of_memory_has_its_own_class(tmp_path: Path) -> None:
    """A real failed allocation, in a process of its own: its address space is closed just above what it uses."""
    model = write_tiny(tmp_path / "wide.gguf", n_layer=2, n_embd=256, n_head=8, n_head_kv=4, n_ctx=65536)
    code = f"""
import resource
from pathlib import Path
from kvtape.backends.errors import EngineFault
from kvtape.backends.openvino.engine import OpenVinoEngine
from kvtape.backends.protocol import SessionConfig
engine = OpenVinoEngine.load({str(model)!r})
backend, sibling = (engine.open(SessionConfig(n_ctx=32768, chunk=20000)) for _ in range(2))
logits = sibling.prefill([5] * 40, 0).logits
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), resource.RLIM_INFINITY))
try:
    backend.prefill([5] * 20000, 0)
except EngineFault as err:
    print(err.fatal_class)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
twin = engine.open(SessionConfig(n_ctx=32768))
twin.prefill([5] * 40, 0)
print((sibling.prefill([6], 40).logits == twin.prefill([6], 40).logits).all())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["allocator_exhausted", "True"], done.stderr
