"""Servers as processes of their own: `kvtape serve`, and the server that llama-cpp-python brings along."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

__all__ = ["BARE_NEEDS", "ServerProcess", "free_port", "start_bare", "start_kvtape", "started", "why_not_bare"]

BARE_NEEDS = ("fastapi", "sse-starlette", "starlette-context", "pydantic-settings", "uvicorn", "starlette<1")
"""What `python -m llama_cpp.server` needs beside llama-cpp-python: `pip install --target DIR` puts it apart."""

_QUIET = {"OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}
_START_S = 120.0


@dataclass(slots=True)
class ServerProcess:
    """A process that listens on `url`; what it writes to stderr goes to `errors`."""

    url: str
    process: subprocess.Popen[bytes]
    errors: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def hosts(self) -> list[int]:
        """The processes below it (engine hosts), parents first."""
        found: list[int] = []
        for parent in (above := [self.pid]):
            children = _children(parent)
            above += children
            found += children
        return found

    def rss_bytes(self) -> int:
        """Resident memory of it and of the processes below it; 0 when it has ended."""
        return sum(map(_rss, [self.pid, *self.hosts()]))

    def cpu_s(self) -> float:
        """Processor seconds of all its threads so far, without those of the processes below it."""
        # CLOCK_PROCESS_CPUTIME_ID of another process, as clock_getcpuclockid(3) makes it.
        return time.clock_gettime((~self.pid << 3) | 2)

    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send a signal and wait; the exit status. What is below it dies with it when it is killed."""
        below = self.hosts() if number == signal.SIGKILL else []
        if self.alive():
            self.process.send_signal(number)
        code = self.process.wait(timeout_s)
        for pid in below:
            _until_gone(pid, 20.0)
        return code


def start_kvtape(model: Path, log: Path, *more: str, name: str = "served", port: int = 0) -> ServerProcess:
    """`kvtape serve`. Raises as `started`."""
    port = port or free_port()
    command = [sys.executable, "-m", "kvtape.cli", "serve", "--model", str(model), "--log", str(log)]
    return started([*command, "--name", name, "--port", str(port), *more], port, log.with_suffix(".err"))


def start_bare(
    model: Path, needs: Path | None, errors: Path, *, n_ctx: int, verbose: bool = False, name: str = "served"
) -> ServerProcess:
    """`python -m llama_cpp.server` with one thread; `needs`: the folder with BARE_NEEDS. `verbose`: it says in `errors`
    what it reuses of each prompt. Raises as `started`."""
    port = free_port()
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(model), "--n_ctx", str(n_ctx)]
    # By default a request there ends the one before it.
    command += [
        "--n_threads",
        "1",
        "--n_threads_batch",
        "1",
        "--interrupt_requests",
        "false",
        "--verbose",
        str(verbose).lower(),
    ]
    command += ["--model_alias", name, "--host", "127.0.0.1", "--port", str(port)]
    return started(command, port, errors, _with(needs))


def why_not_bare(needs: Path | None) -> str | None:
    """None when llama-cpp-python's server can be started, else the reason."""
    done = subprocess.run(
        [sys.executable, "-c", "import llama_cpp.server.app"],
        env={**os.environ, **_with(needs)},
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.returncode:
        return None
    last = done.stderr.strip().splitlines()[-1]
    return f"{last}; pip install --target DIR {' '.join(map(repr, BARE_NEEDS))}, and name DIR"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _with(needs: Path | None) -> dict[str, str]:
    return {} if needs is None else {"PYTHONPATH": str(needs)}


def started(command: Sequence[str], port: int, errors: Path, more: Mapping[str, str] | None = None) -> ServerProcess:
    """A server that `command` starts on `port`, listening. Raises AssertionError with what it said when it does not."""
    with errors.open("ab") as to:
        process = subprocess.Popen(command, stderr=to, stdout=to, env={**os.environ, **_QUIET, **(more or {})})
    server = ServerProcess(f"http://127.0.0.1:{port}", process, errors)
    until = time.monotonic() + _START_S
    while time.monotonic() < until and server.alive():
        try:
            if httpx.get(f"{server.url}/v1/models", timeout=5).status_code == 200:
                return server
        except httpx.TransportError:
            time.sleep(0.05)
    process.kill()
    process.wait()
    raise AssertionError(f"{' '.join(command[:4])} does not serve: {errors.read_text(errors='replace')[-2000:]}")


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _until_gone(pid: int, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while _rss(pid):
        assert time.monotonic() < until, f"process {pid} outlives its parent"
        time.sleep(0.02)
