"""What is refused and never fatal, what cannot be opened, and the host that is killed under every operation."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kvtape.backends.errors import EnvironmentProblem, FatalClass, SessionFatal
from kvtape.backends.isolated.engine import open_isolated
from kvtape.backends.openvino import compiled
from kvtape.backends.openvino.engine import OpenVinoEngine
from kvtape.backends.protocol import Engine, SessionConfig
from kvtape.planner.events import Op
from kvtape.testing.sink import ListSink
from support.engines import ENGINES, load_engine
from support.fault_plays import PLAYS, start
from support.fault_refusals import REFUSALS, Refusal
from support.tiny_gguf import write_tiny

pytestmark = pytest.mark.contract("I1")

_folder = tempfile.TemporaryDirectory(prefix="kvtape-refusals-")


@functools.cache
def model() -> Path:
    return write_tiny(Path(_folder.name) / "llama.gguf", "llama")


@functools.cache
def engine(name: str) -> Engine:
    return load_engine(name, model())


def memory(backend: Any) -> list[bytes]:
    seen = backend.witness()
    return [seen.cache_positions.tobytes(), *(a.tobytes() for a in (*seen.rows.keys, *seen.rows.values))]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: r.what)
def test_a_refusal_is_typed_recorded_and_changes_nothing(refusal: Refusal, name: str) -> None:
    sink = ListSink()
    session = start(refusal.play, engine(name).open(refusal.play.config), "s", sink)
    backend = session._parts.backend
    refusal.spoil(session)
    before, layout, tape = memory(backend), backend.books(), session.tape
    with pytest.raises(refusal.error):
        refusal.run(session)
    assert (memory(backend), backend.books(), session.tape) == (before, layout, tape)
    assert (sink.events[-1].op, sink.events[-1].error_class) == (Op.REFUSE, refusal.error.__name__)
    assert not session.ended
    session.prefill_suffix([5, 6, 7])
    session.decode(2, stop_tokens=frozenset())
    session.close()
    assert Op.FATAL not in {e.op for e in sink.events}


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_DEVICE", "GPU.7")
    own = OpenVinoEngine.load(model())
    with pytest.raises(EnvironmentProblem, match=r"llama\.gguf: OpenVINO cannot compile this model"):
        own.open(SessionConfig(n_ctx=256))
    monkeypatch.undo()
    own.open(SessionConfig(n_ctx=256)).prefill([5, 6], 0)
    own.close()


def test_a_context_that_cannot_be_allocated() -> None:
    """In a process whose address space is closed just above what it uses; our own look at free memory is told lies."""
    code = f"""
import resource
from pathlib import Path
from kvtape.backends.errors import EnvironmentProblem
from kvtape.backends.llama import options
from kvtape.backends.llama.engine import LlamaEngine
from kvtape.backends.protocol import SessionConfig
options._available_bytes = lambda: 1 << 60
engine = LlamaEngine.load({str(model())!r})
engine.open(SessionConfig(n_ctx=256)).close()
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
try:
    engine.open(SessionConfig(n_ctx=1 << 21))
except EnvironmentProblem as err:
    print("refused", "cannot create this context" in str(err))
backend = engine.open(SessionConfig(n_ctx=256))
print("opens", len(backend.prefill([5] * 9, 0).logits) > 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["refused", "True", "opens", "True"], done.stderr[-2000:]


@pytest.mark.parametrize("name", ENGINES)
def test_a_host_that_dies_is_a_lost_device_in_every_operation(name: str) -> None:
    """One host, a session prepared for each operation, one SIGKILL; the next session opens on a new host."""
    host = open_isolated(name, model())
    sinks = {operation: ListSink() for operation in PLAYS}
    sessions = {o: start(p, host.open(p.config), o, sinks[o]) for o, p in PLAYS.items()}
    assert host.host_pid is not None
    os.kill(host.host_pid, signal.SIGKILL)
    for operation, session in sessions.items():
        with pytest.raises(SessionFatal) as first:
            PLAYS[operation].act(session)
        assert first.value.fatal_class is FatalClass.DEVICE_LOST
        assert "signal 9" in first.value.cause_message or "SIGKILL" in first.value.cause_message
        with pytest.raises(SessionFatal) as again:
            session.decode(1)
        assert again.value.cause_message == first.value.cause_message
        told = [e for e in sinks[operation].events if e.op is Op.FATAL]
        assert [e.error_class for e in told] == ["device_lost"]
        session.close()
    fresh = start(PLAYS["prefill"], host.open(PLAYS["prefill"].config), "again", ListSink())
    PLAYS["prefill"].act(fresh)
    fresh.close()
    host.close()
