"""How hosts begin and end: nothing is left of them, and none outlives its parent."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvtape.backends.errors import EngineFault, EnvironmentProblem, SessionClosed
from kvtape.backends.isolated import channel
from kvtape.backends.isolated.engine import open_isolated
from kvtape.backends.isolated.process import HostProcess, Limits
from kvtape.backends.isolated.values import RECORDS
from kvtape.backends.protocol import SessionConfig
from support.isolated import children, descriptors, engine, interrupted_in_a_call, model_file, session, until
from support.llama_tiny import tokens


def test_a_closed_session_refuses_and_still_says_why_it_could_not() -> None:
    backend = session(cold_budget_tokens=0)
    reason = backend.refusal("cold_store")
    backend.close()
    backend.close()
    for call in (lambda: backend.prefill([4], 0), backend.books, backend.witness, backend.kv_bytes, backend.snapshot):
        with pytest.raises(SessionClosed):
            call()
    assert backend.refusal("cold_store") == reason is not None
    assert backend.refusal("remove_tail") is None
    backend.cancel()


def test_closing_the_engine_closes_its_sessions_and_ends_the_process() -> None:
    before = children()
    host = open_isolated("llama", model_file("llama"))
    assert children() - before == {host.host_pid}
    backend = session(host)
    backend.prefill(tokens(5), 0)
    host.close()
    host.close()
    assert children() == before
    assert host.host_pid is None
    for call in (lambda: backend.books(), lambda: host.open(SessionConfig()), lambda: host.tokenize("a")):
        with pytest.raises(SessionClosed):
            call()


def test_nothing_is_left_of_six_engines() -> None:
    """The toy's host is quicker to start than an engine's, and ends by the same code."""

    def open_and_close() -> None:
        host = open_isolated("toy", "none", loader="support.rigged_engines:load_toy")
        host.open(SessionConfig(n_ctx=64)).prefill([5, 6], 0)
        host.close()

    open_and_close()  # what the first one imports stays
    count = (descriptors(), children(), threading.active_count())
    for _ in range(6):
        open_and_close()
    assert (descriptors(), children(), threading.active_count()) == count


def test_nothing_is_left_of_forty_sessions() -> None:
    backend = session()
    count = descriptors()
    before = host_descriptors()
    for i in range(40):
        other = session()
        other.prefill(tokens(5), 0)
        if i % 2:
            other.close()
        del other
    assert descriptors() == count
    backend.kv_bytes()
    until(lambda: host_descriptors() <= before)  # those that were let go without a close end in their own time
    assert host_descriptors() == before
    backend.close()


def host_descriptors() -> int:
    return len(list(Path(f"/proc/{engine().host_pid}/fd").iterdir()))


def test_an_engine_that_is_let_go_without_a_close_leaves_no_process() -> None:
    before = (descriptors(), children())
    host = open_isolated("llama", model_file("llama"))
    session(host).prefill(tokens(5), 0)
    del host
    assert (descriptors(), children()) == before


def test_a_fork_of_the_parent_does_not_end_the_host() -> None:
    host = open_isolated("llama", model_file("llama"))
    child = os.fork()
    if child == 0:
        del host
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert session(host).prefill(tokens(5), 0).tokens == 5
    host.close()


def test_ctrl_c_while_an_engine_loads_leaves_no_process() -> None:
    before = (descriptors(), children())
    with pytest.raises(KeyboardInterrupt), interrupted_in_a_call():
        open_isolated("toy", "none", loader="support.rigged_engines:loads_forever")
    assert (descriptors(), children()) == before


def test_ctrl_c_in_a_call_of_an_engine_gives_it_a_new_host() -> None:
    """What the old one would still answer belongs to nobody; the sessions on it are lost."""
    host = open_isolated("toy", "none", loader="support.rigged_engines:load_toy")
    lost = host.open(SessionConfig(n_ctx=64))
    with pytest.raises(KeyboardInterrupt), interrupted_in_a_call():
        host.tokenize("slowly")
    assert host.open(SessionConfig(n_ctx=64)).prefill([5, 6], 0).tokens == 2
    assert host.hosts_started == 2
    with pytest.raises(EngineFault, match="device_lost"):
        lost.books()
    host.close()


PARENT = """
import sys, time
from kvtape.backends.isolated.engine import open_isolated
from kvtape.backends.protocol import SessionConfig
host = open_isolated("llama", sys.argv[1])
backend = host.open(SessionConfig(n_ctx=8192, chunk=1))
print(host.host_pid, flush=True)
if sys.argv[2] == "busy":
    backend.prefill([5] * 8000, 0)
sys.stdin.readline()
"""


@pytest.mark.parametrize("state", ["busy", "idle"])
def test_a_host_does_not_outlive_its_parent(state: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model_file("llama")), state], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    until(lambda: not running(pid))


def running(pid: int) -> bool:
    """A zombie that nobody reaps has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_host_outlives_the_thread_that_started_it_and_ends_with_its_pipe() -> None:
    """What the kernel takes for the parent is that thread, so such a host is not bound to it: the pipe is."""
    made: list[HostProcess] = []
    thread = threading.Thread(target=lambda: made.append(HostProcess(Limits())))
    thread.start()
    thread.join()
    host = made[0]
    time.sleep(0.1)
    assert host.alive
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, host._cancels)  # the pipe's only writing end is gone, as when this process dies
    os.close(nowhere)
    until(lambda: not host.alive)
    host.close()


def test_a_host_that_cannot_start_is_a_problem_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = (descriptors(), children())
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(EnvironmentProblem, match="does not start"):
        open_isolated("llama", model_file("llama"))
    monkeypatch.undo()
    monkeypatch.setattr(sys, "path", ["/nonexistent"])
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    with pytest.raises(EnvironmentProblem, match="does not start"):
        open_isolated("llama", model_file("llama"))
    assert (descriptors(), children()) == before


def test_a_host_that_is_not_ready_in_time_is_ended() -> None:
    before = (descriptors(), children())
    with pytest.raises(EnvironmentProblem, match=r"not ready after 0\.001 s"):
        open_isolated("llama", model_file("llama"), limits=Limits(start=0.001))
    assert (descriptors(), children()) == before


def test_a_host_of_another_kvtape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program that runs on meets when the package under it is replaced."""
    before = (descriptors(), children())
    monkeypatch.delitem(RECORDS, "Segment")
    with pytest.raises(EnvironmentProblem, match="start this program again"):
        open_isolated("llama", model_file("llama"))
    assert (descriptors(), children()) == before


def test_a_call_hears_that_its_host_died_before_the_next_host_has_its_socket_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would wait at the new socket, for an answer that is another's."""
    host = open_isolated("llama", model_file("llama"))
    first, control = host.host_pid, host._host.control
    at_the_socket, may_read = threading.Event(), threading.Event()
    receive = channel.receive

    def held(sock: socket.socket) -> Any:
        if threading.current_thread().name == "caller":
            at_the_socket.set()
            assert may_read.wait(60)
        return receive(sock)

    monkeypatch.setattr(channel, "receive", held)
    told: list[object] = []

    def call() -> None:
        try:
            told.append(host.detokenize([5]))
        except EngineFault as fault:
            told.append(fault)

    threads = [
        threading.Thread(target=call, name="caller"),
        threading.Thread(target=lambda: told.append(host.tokenize("a"))),
    ]
    threads[0].start()
    assert at_the_socket.wait(60)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: host.host_pid is None)
    threads[1].start()
    time.sleep(0.2)
    assert control.fileno() != -1
    may_read.set()
    for thread in threads:
        thread.join(60)
    assert isinstance(told[0], EngineFault)
    assert isinstance(told[1], list)
    assert (host.hosts_started, control.fileno()) == (2, -1)
    host.close()
