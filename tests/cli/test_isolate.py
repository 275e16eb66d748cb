"""`--isolate`: the same log and the same verdict, and an engine that dies takes its session, not the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtape.backends.isolated.backend import IsolatedBackend
from kvtape.traces.reader import open_log
from support.command import kvtape
from support.isolated import children, descriptors
from support.recorded import POLICY, TEXT, record
from support.tiny_gguf import write_tiny


def test_a_recording_in_a_host_is_the_same_recording(model: Path, tmp_path: Path, log: Path) -> None:
    other = tmp_path / "isolated.duckdb"
    before = (descriptors(), children())
    ran = record(model, other, "--content", "--isolate")
    assert ran.code == 0, ran.err
    assert (descriptors(), children()) == before
    assert kvtape("diff", log, other).code == 0
    with open_log(other) as tape, open_log(log) as plain:
        asked, without = (json.loads(t.default_run().config) for t in (tape, plain))
    assert asked.pop("isolate") is True
    assert asked == without


def test_a_replay_in_hosts_gives_the_same_verdict(model: Path, log: Path) -> None:
    before = children()
    options = ("replay", log, "--model", model, "--on", "llama", "--on", "llama:way=recompute", "--json")
    plain, isolated = kvtape(*options), kvtape(*options, "--isolate")
    assert (isolated.code, json.loads(isolated.out)) == (0, json.loads(plain.out))
    assert children() == before


def test_an_engine_that_dies_in_a_replay_is_a_divergence(
    model: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    evict = IsolatedBackend.evict

    def killed(self: IsolatedBackend, start: int, stop: int) -> None:
        hosts = children() - before
        assert hosts, "the engine's host is seen while it works"
        for pid in hosts:
            os.kill(pid, signal.SIGSEGV)
        evict(self, start, stop)

    monkeypatch.setattr(IsolatedBackend, "evict", killed)
    ran = kvtape("replay", log, "--model", model, "--on", "llama", "--isolate", "--json")
    assert ran.code == 1, ran.err
    first = json.loads(ran.out)["first_divergence"]
    assert "device_lost: the engine host died of SIGSEGV in evict" in json.dumps(first)
    assert children() == before


@pytest.mark.parametrize("verb", ["record", "replay"])
def test_a_deadline_needs_a_host(model: Path, log: Path, tmp_path: Path, verb: str) -> None:
    options = {
        "record": ("record", "--model", model, "--text", "-", "--log", tmp_path / "a.duckdb"),
        "replay": ("replay", log, "--model", model, "--on", "llama"),
    }
    ran = kvtape(*options[verb], "--deadline", 5)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "--isolate" in ran.err


def while_it_records(tmp_path: Path, act: Callable[[subprocess.Popen[bytes], int], None]) -> tuple[int, str, Path]:
    """Exit code, stderr and log of a long recording to which `act` was done in its middle; its host is gone."""
    model = write_tiny(tmp_path / "tiny.gguf", n_ctx=65536)
    source, log = tmp_path / "text.txt", tmp_path / "a.duckdb"
    source.write_text(TEXT * 100, encoding="utf-8")
    options = ["--n-ctx", "256", "--chunk", "2", "--content", "--isolate", "--policy", POLICY]
    where = ["--model", str(model), "--text", str(source), "--log", str(log)]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtape.cli", "record", *where, *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None and not log.with_name("a.duckdb.head.json").exists():
        time.sleep(0.02)
    time.sleep(0.3)
    (host,) = children_of(process.pid)
    act(process, host)
    _, err = process.communicate(timeout=200)
    assert not Path(f"/proc/{host}").exists()
    return process.returncode, err.decode(), log


def children_of(pid: int) -> list[int]:
    return [int(p) for task in Path(f"/proc/{pid}/task").iterdir() for p in (task / "children").read_text().split()]


def test_a_host_that_is_killed_leaves_a_sealed_log_that_replays(tmp_path: Path) -> None:
    code, err, log = while_it_records(tmp_path, lambda _, host: os.kill(host, signal.SIGKILL))
    assert code == 1, err
    assert err.count("\n") == 1
    assert "device_lost: the engine host died of SIGKILL in " in err
    assert kvtape("verify", log).code == 0
    with open_log(log) as tape:
        assert tape.sealed
        events = tape.events(tape.default_run().run_id, "main")
    assert [str(e.op) for e in events[-2:]] == ["fatal", "close"]
    assert events[-2].error_class == "device_lost"
    ran = kvtape("replay", log, "--model", tmp_path / "tiny.gguf", "--on", "llama", "--json")
    assert ran.code == 0, ran.err
    (backend,) = json.loads(ran.out)["backends"]
    assert backend["not_executed"] == 2  # the fatal event and the close behind it


def test_ctrl_c_of_a_terminal_goes_to_the_command_alone(tmp_path: Path) -> None:
    """The terminal sends it to the whole process group."""
    code, err, log = while_it_records(tmp_path, lambda process, _: os.killpg(process.pid, signal.SIGINT))
    assert code == 130, err
    assert "is sealed" in err
    assert kvtape("verify", log).code == 0
    with open_log(log) as tape:
        events = tape.events(tape.default_run().run_id, "main")
    assert str(events[-1].op) == "close"
    assert not [e for e in events if str(e.op) == "fatal"]
