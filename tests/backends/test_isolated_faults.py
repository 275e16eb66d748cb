"""What takes a host down takes its sessions down, each with its cause: not this process, and not the log."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import EngineFault, FatalClass, SessionFatal
from kvtape.backends.isolated.backend import IsolatedBackend
from kvtape.backends.isolated.engine import IsolatedEngine, open_isolated
from kvtape.backends.isolated.process import Limits
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.events import Op
from kvtape.planner.ranges import RangeSet
from kvtape.planner.specs import parse_policy
from kvtape.replay.replayer import replay
from kvtape.testing.sink import ListSink
from kvtape.traces.reader import open_log
from support import llama_tiny
from support.host_kills import KilledPool, KillPlan
from support.isolated import (
    assert_lost,
    children,
    descriptors,
    interrupted_in_a_call,
    model_file,
    rigged,
    session,
    until,
)
from support.llama_tiny import tokens

pytestmark = pytest.mark.contract("I1")


def greedy(logits: Any) -> int:
    return int(logits.argmax())


def every_call(backend: IsolatedBackend) -> list[Callable[[], object]]:
    return [
        lambda: backend.prefill([4], 400),
        lambda: backend.decode_until(1, 512, 400, backend.prefill([4], 0).logits, greedy),
        lambda: backend.truncate(0),
        lambda: backend.evict(0, 1),
        lambda: backend.rebuild(RangeSet(), []),
        lambda: backend.restore(b""),
        backend.snapshot,
        backend.witness,
        backend.books,
        backend.kv_bytes,
        backend.abort_next,
    ]


def die_in_prefill(host: IsolatedEngine, **config: Any) -> EngineFault:
    """The fault of a session that is rigged; every later call gives the same one, and another session is lost too."""
    backend, sibling = session(host, **config), session(host, **config)
    sibling.prefill(tokens(4), 0)
    backend.prefill(tokens(8), 0)
    backend.abort_next()
    with pytest.raises(EngineFault) as first:
        backend.prefill(tokens(8), 8)
    for call in every_call(backend):
        with pytest.raises(EngineFault) as again:
            call()
        assert again.value is first.value
    assert backend.refusal("sparse_attention")
    with pytest.raises(EngineFault) as other:
        sibling.prefill(tokens(4), 4)
    assert_lost(other.value)
    for lost in (backend, sibling):
        lost.cancel()
        lost.close()
        lost.close()
    with pytest.raises(EngineFault):
        backend.books()
    return first.value


NATIVE: dict[str, tuple[str, str, tuple[Any, ...], dict[str, Any], tuple[str, ...]]] = {
    # rig, engine, tiny model, what the session asks for, words of the cause
    "a segfault": ("segfault", "llama", (), {}, ("died of SIGSEGV in prefill",)),
    "an abort": ("abort", "llama", (), {}, ("died of SIGABRT in prefill",)),
    "a kill": ("out_of_memory", "llama", (), {}, ("died of SIGKILL in prefill", "memory runs out")),
    "an exit": ("exit", "llama", (), {}, ("ended with exit code 3 in prefill",)),
    "llama.cpp asserts on a sequence id": ("bad_sequence", "llama", (), {}, ("SIGABRT", "GGML_ASSERT(seq_id")),
    "llama.cpp shifts bf16 keys": (
        *("ungated_shift", "llama", ()),
        {"kv_type_k": "bf16", "kv_type_v": "bf16"},
        ("SIGABRT", "ops.cpp", "fatal error"),
    ),
    "llama.cpp shifts a cache without layers": (
        *("ungated_shift", "llama", ("gemma3", 1)),
        {"kv_type_k": "f16", "kv_type_v": "f16", "options": {"swa_full": "yes"}},
        ("SIGABRT", "GGML_ASSERT(buffer)"),
    ),
    "OpenVINO writes past its rows": ("corrupt_heap", "openvino", (), {}, ("died of SIG", "in prefill")),
}


@pytest.mark.parametrize("what", NATIVE)
def test_a_native_death_is_a_lost_device_and_the_engine_opens_again(what: str) -> None:
    rig, name, model, config, words = NATIVE[what]
    path = llama_tiny.model_file(model[0], n_layer=model[1]) if model else model_file(name)
    before = (descriptors(), children())
    host = rigged(rig, name, path)
    fault = die_in_prefill(host, **config)
    assert_lost(fault, *words)
    assert "/" not in fault.cause  # no folder of a build or a user
    assert str(fault).startswith("device_lost: the engine host ")
    assert (host.host_pid, host.hosts_started) == (None, 1)
    if rig in ("abort", "corrupt_heap"):  # one of each engine: a start costs more than all the rest
        again = session(host, **config)
        assert again.prefill(tokens(8), 0).tokens == 8
        assert host.hosts_started == 2
    host.close()
    assert (descriptors(), children()) == before


def test_a_host_that_hangs_is_killed_after_its_deadline() -> None:
    """In native code that keeps the interpreter's lock, so that nothing in the host could notice."""
    host = rigged("hang", limits=Limits(answer=4))
    pid = host.host_pid
    assert_lost(die_in_prefill(host), "did not answer within 4 s in prefill and was killed")
    assert pid not in children()
    host.close()


def test_the_deadline_does_not_count_the_time_of_a_choice() -> None:
    host = rigged("hang", limits=Limits(answer=2))
    backend = session(host)
    logits = backend.prefill(tokens(8), 0).logits
    run = backend.decode_until(1, 512, 8, logits, lambda row: time.sleep(2.5) or greedy(row))  # type: ignore[func-returns-value]
    assert len(run.tokens) == 1
    host.close()


@pytest.mark.parametrize(
    ("rig", "words"),
    [("garbage", "not a message: b'what'"), ("wrong_type", "a result \"['ok', {'logits': 1}]\"")],
)
def test_a_host_that_talks_nonsense_is_ended(rig: str, words: str) -> None:
    host = rigged(rig)
    assert_lost(die_in_prefill(host), "gave an answer that makes no sense in prefill and was killed", words)
    host.close()


def test_a_death_between_two_tokens_ends_the_run_and_not_the_choice() -> None:
    host = rigged("segfault")
    backend = session(host)
    logits = backend.prefill(tokens(8), 0).logits
    backend.abort_next()
    chosen: list[int] = []

    def choose(row: Any) -> int:
        chosen.append(greedy(row))
        return chosen[-1]

    with pytest.raises(EngineFault) as fault:
        backend.decode_until(9, 512, 8, logits, choose)
    assert_lost(fault.value, "died of SIGSEGV in decode_until")
    assert len(chosen) == 2
    host.close()


def test_a_death_while_nobody_calls_is_found_by_the_next_call() -> None:
    host = open_isolated("llama", model_file("llama"))
    backend = session(host)
    backend.prefill(tokens(8), 0)
    os.kill(host.host_pid or 0, signal.SIGTERM)
    with pytest.raises(EngineFault) as fault:
        backend.prefill(tokens(8), 8)
    assert_lost(fault.value, "died of SIGTERM in prefill")
    backend.close()
    host.close()


def test_an_engine_that_dies_while_it_loads_is_lost() -> None:
    before = (descriptors(), children())
    with pytest.raises(EngineFault) as fault:
        open_isolated("llama", model_file("llama"), loader="support.rigged_engines:dies_while_loading")
    assert_lost(fault.value, "died of SIGSEGV in load")
    assert (descriptors(), children()) == before


def test_memory_that_the_engine_cannot_get_is_the_same_error_here() -> None:
    host = rigged("memory_error")
    backend = session(host)
    backend.abort_next()
    with pytest.raises(MemoryError, match="Unable to allocate"):
        backend.prefill(tokens(8), 0)
    host.close()


def test_a_failure_that_the_engine_reports_stays_the_first_cause_and_the_host_lives() -> None:
    host = open_isolated("llama", model_file("llama"))
    pid = host.host_pid
    backend, sibling = session(host), session(host)
    backend.prefill(tokens(8), 0)
    sibling.prefill(tokens(8), 0)
    backend.abort_next()
    with pytest.raises(EngineFault, match="prefill_failed: llama_decode returned 2") as first:
        backend.prefill(tokens(8), 8)
    os.kill(pid or 0, signal.SIGKILL)
    with pytest.raises(EngineFault) as other:
        sibling.prefill(tokens(8), 8)
    assert_lost(other.value, "SIGKILL")
    for call in every_call(backend):
        with pytest.raises(EngineFault) as again:
            call()
        assert again.value is first.value
    host.close()


def test_another_model_in_the_files_place_is_not_taken_for_it(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(llama_tiny.model_file("llama").read_bytes())
    host = open_isolated("llama", path)
    path.write_bytes(llama_tiny.model_file("qwen2").read_bytes())
    os.kill(host.host_pid or 0, signal.SIGKILL)
    until(lambda: host.host_pid is None)
    with pytest.raises(Exception, match="another model than when the engine was opened"):
        session(host)
    host.close()


# -- sessions and logs ------------------------------------------------------------------------------------------------


def test_a_session_goes_fatal_with_the_cause_and_keeps_its_account() -> None:
    host, sink = rigged("bad_sequence"), ListSink()
    backend = host.open(SessionConfig(n_ctx=256, chunk=16))
    running = Session(backend, parse_policy("none"), sink, ManualClock(), run_id="r", session_id="s")
    running.ensure_prefix(tokens(20))
    backend.abort_next()
    with pytest.raises(SessionFatal, match="device_lost: the engine host died of SIGABRT in prefill") as first:
        running.ensure_prefix(tokens(40))
    assert first.value.fatal_class is FatalClass.DEVICE_LOST
    for call in (lambda: running.decode(1), running.snapshot, lambda: running.ensure_prefix(tokens(3))):
        with pytest.raises(SessionFatal) as again:
            call()
        assert again.value.cause_message == first.value.cause_message
    told = running.explain()
    assert told.fatal == f"device_lost: {first.value.cause_message}"
    assert told.resident == [(0, 20)]
    running.close()
    running.close()
    assert [e.op for e in sink.events[-2:]] == [Op.FATAL, Op.CLOSE]
    assert sink.events[-2].error_class == "device_lost"
    host.close()


def compute_for_long(running: Session) -> None:
    for _ in range(10_000):
        running.ensure_prefix([5])
        running.ensure_prefix(tokens(4000))


def test_ctrl_c_in_a_session_closes_it_and_the_host_serves_on() -> None:
    host, sink = open_isolated("llama", model_file("llama")), ListSink()
    backend = host.open(SessionConfig(n_ctx=4096, chunk=4000))
    running = Session(backend, parse_policy("none"), sink, ManualClock(), run_id="r", session_id="s")
    with pytest.raises(KeyboardInterrupt), interrupted_in_a_call():
        compute_for_long(running)
    assert (sink.events[-1].op, sink.events[-1].reason) == (Op.CLOSE, "interrupted")
    assert session(host).prefill(tokens(5), 0).tokens == 5
    assert host.hosts_started == 1
    host.close()


@pytest.mark.parametrize(("name", "runs"), [("llama", 5), ("openvino", 2)])
def test_a_host_killed_at_random_leaves_a_log_that_verifies_and_a_slot_that_opens(
    name: str, runs: int, tmp_path: Path
) -> None:
    """`make soak` does it 200 times."""
    before = (descriptors(), children())
    pool = KilledPool(name, model_file(name))
    outcomes = [pool.run(tmp_path / f"{seed}.duckdb", KillPlan.drawn(seed)) for seed in range(runs)]
    pool.close()
    assert (descriptors(), children()) == before
    assert len({o.operation for o in outcomes}) > 1
    assert len({o.signal for o in outcomes}) > 1
    with open_log(tmp_path / "0.duckdb") as tape:
        report = replay(tape, [name], model_file(name)).to_json()
    assert report["equal"], report["first_divergence"]
    assert report["backends"][0]["not_executed"] >= 1
