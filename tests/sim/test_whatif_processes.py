"""The local pool of a what-if: a worker that is killed, a Ctrl-C, a parent that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtape.backends.errors import UsageError
from kvtape.sim.whatif.executors import Executor, Serial, WorkerLost
from kvtape.sim.whatif.processes import Processes
from support.whatif_jobs import die_at, fail_at, sleep

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks for children in /proc")
POOL = """
import sys
from kvtape.cli.errors import describe
from kvtape.sim.whatif.processes import Processes
from support.whatif_jobs import sleep

try:
    with Processes(2).open(sleep, 600.0) as run:
        list(run([1, 2, 3]))
except KeyboardInterrupt as err:
    print(*describe(err))
"""


@pytest.mark.parametrize("executor", [Serial(), Processes(2)])
def test_a_runner_can_be_used_again_and_hands_on_what_a_job_raises(executor: Executor) -> None:
    with executor.open(fail_at, 5) as run:
        assert dict(run([4, 3, 2])) == {0: 40, 1: 30, 2: 20}
        assert dict(run([1])) == {0: 10}
        assert dict(run([])) == {}
        with pytest.raises(UsageError, match="task 5 is refused"):
            list(run([5]))


def test_a_worker_that_is_killed_is_one_error_that_names_the_point() -> None:
    with (
        pytest.raises(WorkerLost, match=r"was killed by SIGKILL while it simulated 7; .* fewer --workers") as caught,
        Processes(2).open(die_at, 7) as run,
    ):
        list(run([1, 7, 2]))
    assert caught.value.exit_code == 3


def test_workers_end_with_the_block() -> None:
    others = set(children(os.getpid()))  # hosts of engines that other tests keep
    with Processes(2).open(sleep, 0.0) as run:
        list(run([1, 2]))
        workers = set(children(os.getpid())) - others
    if sys.platform == "linux":
        assert len(workers) >= 2
        assert not workers & set(children(os.getpid()))


@LINUX
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_a_ctrl_c_or_a_killed_parent(signum: signal.Signals) -> None:
    """The signal goes to the whole group, as a terminal sends it."""
    pool = subprocess.Popen(
        [sys.executable, "-c", POOL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        start_new_session=True,
    )
    until(lambda: len(children(pool.pid)) == 2)
    workers = children(pool.pid)
    began = time.monotonic()
    os.killpg(pool.pid, signum)
    out, err = pool.communicate(timeout=20)
    assert time.monotonic() - began < 10
    assert err == b""
    assert out == (b"130 interrupted\n" if signum == signal.SIGINT else b"")
    until(lambda: not any(alive(pid) for pid in workers))


def children(pid: int) -> list[int]:
    """Process ids, from the kernel."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


def alive(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has fetched."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(happened: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)
