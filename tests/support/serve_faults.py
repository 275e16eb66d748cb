"""A server that is kept running, and what may happen to it under load; drawn from a seed, due after so many turns."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from support.server_process import ServerProcess

__all__ = ["EXITS", "FAULTS", "Supervised", "plan_faults", "why_not_slow"]

FAULTS = ("host_killed", "server_stopped", "disk_slow", "server_killed", "disk_full")
EXITS = {"server_stopped": 0, "server_killed": -signal.SIGKILL, "disk_full": 3}
"""How the server must end by each fault that ends it."""

_SLOW_CALLS = 3
_SLOW_S = 30.0
_SLOW_US = 100_000
_ROOM_BYTES = 2_000
_WAIT_S = 240.0


def plan_faults(seed: int, n: int, turns: int, kinds: Sequence[str] = FAULTS) -> dict[int, str]:
    """`n` faults by how many turns have ended when they strike; every kind as often as the others."""
    rng = random.Random(seed)
    drawn = [kinds[i % len(kinds)] for i in range(n)]
    rng.shuffle(drawn)
    step = turns / (n + 1)
    return {max(1, round(step * (i + 1) + rng.uniform(-0.3, 0.3) * step)): kind for i, kind in enumerate(drawn)}


def why_not_slow() -> str | None:
    """None when a disk can be made slow: fsync of a process that runs, delayed by strace."""
    return None if shutil.which("strace") else "strace is not installed"


@dataclass(slots=True)
class Supervised:
    """The server of `start`, started anew whenever it ends. `log`: the folder that it writes.

    `rss`: (turns so far, resident bytes), a list for each start. `ends`: the most seconds from a fault to the server's
    end, by fault. `wrong`: what must not have been.
    """

    start: Callable[[], ServerProcess]
    log: Path
    plan: dict[int, str] = field(default_factory=dict)
    sample_s: float = 0.2
    rss: list[list[tuple[int, int]]] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    ends: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    slow_calls: int = 0
    turns: int = 0
    _due: queue.Queue[str | None] = field(default_factory=queue.Queue)
    _server: ServerProcess | None = None
    _threads: list[threading.Thread] = field(default_factory=list)
    _stopping: bool = False
    _expected: str | None = None
    _struck_s: float = 0.0
    _restarted: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._begin()
        for work in (self._watch, self._strike):
            self._threads.append(threading.Thread(target=work, name=work.__name__))
            self._threads[-1].start()
        return self

    def __exit__(self, *error: object) -> None:
        self._due.put(None)
        self._threads[1].join()
        self._stopping = True
        self._threads[0].join()
        code = self.server.stop()
        if code:
            self.wrong.append(f"the server ended with {code} in the end")

    @property
    def server(self) -> ServerProcess:
        assert self._server is not None
        return self._server

    def turn_ended(self, n: int) -> None:
        self.turns = max(n, self.turns)
        kind = self.plan.pop(n, None)
        if kind is not None:
            self._due.put(kind)

    # -- threads --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._server = self.start()
        self.rss.append([])

    def _watch(self) -> None:
        while not self._stopping:
            if self.server.alive():
                if resident := self.server.rss_bytes():  # none left when it ends just now
                    self.rss[-1].append((self.turns, resident))
            else:
                self._replace()
            time.sleep(self.sample_s)

    def _replace(self) -> None:
        code, kind = self.server.process.returncode, self._expected
        if kind is not None:
            self.ends[kind] = max(self.ends.get(kind, 0.0), round(time.monotonic() - self._struck_s, 1))
        if kind is None:
            self.wrong.append(f"the server ended by itself with {code}")
        elif code != EXITS[kind]:
            self.wrong.append(f"{kind}: the server ended with {code}, not {EXITS[kind]}")
        self._expected = None
        try:
            self._begin()
        except AssertionError as err:
            self.wrong.append(f"after {kind} no start: {err}")
            self._stopping = True
        self._restarted.set()

    def _strike(self) -> None:
        while (kind := self._due.get()) is not None:
            try:
                getattr(self, f"_{kind}")()
                self.done[kind] += 1
            except Exception as err:
                self.wrong.append(f"{kind} could not be done: {type(err).__name__}: {err}")

    # -- faults ---------------------------------------------------------------------------------------------------

    def _host_killed(self) -> None:
        until = time.monotonic() + _WAIT_S
        while not (hosts := self.server.hosts()):
            assert time.monotonic() < until, "the server has no host; start it with --isolate"
            time.sleep(0.01)
        os.kill(hosts[0], signal.SIGKILL)

    def _server_killed(self) -> None:
        self._end("server_killed", lambda: self.server.process.kill())

    def _server_stopped(self) -> None:
        self._end("server_stopped", lambda: self.server.process.terminate())

    def _disk_full(self) -> None:
        """No file of the server may grow past what its segment has now, and a little."""
        newest = max((f.stat() for f in self.log.glob("*.duckdb.wal")), key=lambda found: found.st_mtime_ns)
        limit = newest.st_size + _ROOM_BYTES
        self._end("disk_full", lambda: resource.prlimit(self.server.pid, resource.RLIMIT_FSIZE, (limit, limit)))

    def _disk_slow(self) -> None:
        inject = f"inject=fsync,fdatasync:delay_enter={_SLOW_US}"
        calls = self.log.with_suffix(".strace")
        command = ["strace", "-f", "-qq", "-o", str(calls), "-e", "trace=fsync,fdatasync", "-e", inject]
        with subprocess.Popen(
            [*command, "-p", str(self.server.pid)], stderr=subprocess.DEVNULL, process_group=0
        ) as tracer:
            until = time.monotonic() + _SLOW_S
            while (slow := calls.exists() and calls.read_text().count("DELAYED")) < _SLOW_CALLS:
                if time.monotonic() > until:
                    break
                time.sleep(0.1)
            tracer.terminate()  # it lets go; a SIGINT is ignored below a shell's background job
        with contextlib.suppress(ProcessLookupError):
            os.killpg(tracer.pid, signal.SIGKILL)  # a helper that it may have left
        self.slow_calls += slow

    def _end(self, kind: str, how: Callable[[], object]) -> None:
        self._restarted.clear()
        self._expected, self._struck_s = kind, time.monotonic()
        how()
        if not self._restarted.wait(_WAIT_S):
            self.wrong.append(f"{kind}: the server still runs after {_WAIT_S:g} s")
            self._expected = None
            self.server.stop(signal.SIGKILL)
