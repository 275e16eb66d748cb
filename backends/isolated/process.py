"""The host process: started without a fork of this one, watched, ended, reaped.

It ends when this process does: its pipe for cancels closes, and on Linux the kernel kills it. It is in a process group
of its own, so that a Ctrl-C in the terminal reaches this process alone. What it writes to stderr is kept (the end of
it) and quoted when it dies: a native abort says there what was wrong.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtape.backends.errors import EnvironmentProblem
from kvtape.backends.isolated.frames import CANCEL, receive
from kvtape.backends.isolated.values import WireError, wire_version

__all__ = ["HostProcess", "Limits"]

_MODULE: Final = "kvtape.backends.isolated.host"
_REAP_SECONDS: Final = 10.0
_TAIL_SECONDS: Final = 2.0
_FOLDERS: Final = re.compile(r"/(?:[^\s/:]+/)+")
# Set where the environment has no opinion: threads that spin, or that fight each other for the cores, slow every
# engine down, and both are read before an engine could say so itself.
_QUIET: Final = {"OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1", "GGML_NO_BACKTRACE": "1"}


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds without a sign of life after which a host is killed.

    `start`: until it is ready. `load`: while it loads a model or opens a session. `answer`: in any one call, in a
    decode between two tokens. `close`: while a session or the host ends.
    """

    start: float = 120.0
    load: float = 1800.0
    answer: float = 1800.0
    close: float = 30.0


class HostProcess:
    """A running host, without an engine yet; `module` is what runs in it. Raises EnvironmentProblem when it does not
    start."""

    def __init__(self, limits: Limits, module: str = _MODULE) -> None:
        self.limits = limits
        self.control, theirs = socket.socketpair()
        reader, self._cancels = os.pipe()
        # From any thread, and from a signal handler that interrupts the very thread that holds it.
        self._lock = threading.RLock()
        self.calls = threading.RLock()
        """Held by whoever waits at `control`."""
        self._closed = False
        self._numbers = itertools.count(1)
        try:
            os.set_blocking(self._cancels, False)
            self._process = _spawn(module, theirs.fileno(), reader)
        except BaseException:
            self.control.close()
            os.close(self._cancels)
            raise
        finally:
            theirs.close()
            os.close(reader)
        self._tail = _Tail(self._process)
        self._end = weakref.finalize(self, _end, os.getpid(), self._process, self.control, self._cancels, self._tail)
        self._greet()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._closed and self._process.poll() is None

    def next_number(self) -> int:
        """A number that no other session or engine of this host has."""
        return next(self._numbers)

    def cancel(self, session: int) -> bool:
        """Pass a cancel on; whether it went out. Never waits."""
        with self._lock:
            if self._closed:
                return False
            try:
                # So few bytes go into a pipe whole or not at all.
                os.write(self._cancels, CANCEL.pack(session))
            except OSError:
                return False
            return True

    def kill(self) -> None:
        """End it at once, whatever it does; it is reaped before this returns."""
        self._process.kill()
        self._process.wait()

    def how_it_ended(self, operation: str) -> str:
        """'died of SIGABRT in evict: ggml.c:88: GGML_ASSERT(..)': waits for the end, which a closed socket announced.

        Without process or thread ids and folders: the text goes into logs that must repeat.
        """
        try:
            code = self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"closed its connection in {operation} and was killed"
        how = f"ended with exit code {code}" if code >= 0 else f"died of {_signal_name(-code)}"
        hint = " (as the kernel does when memory runs out)" if -code == signal.SIGKILL else ""
        last = self._tail.last_line()
        return f"{how} in {operation}{hint}" + (f": {last}" if last else "")

    def close(self) -> None:
        """Let it free its engines and end, kill it when it does not. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            with contextlib.suppress(OSError):
                self.control.shutdown(socket.SHUT_WR)
            self._process.wait(self.limits.close)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()
            # The next host's socket gets the number of this one: whoever still waits here must hear the end before.
            with self.calls:
                self._end()

    def _greet(self) -> None:
        self.control.settimeout(self.limits.start)
        try:
            greeting = receive(self.control)
        except BaseException as err:
            why = self._why_not_ready(err)
            self._end()
            if why is None:
                raise
            raise EnvironmentProblem(
                f"the engine host does not start: {why}; free some memory, or run without --isolate"
            ) from None
        if greeting != ["ready", wire_version()]:
            self._end()
            raise EnvironmentProblem("the installed kvtape is not the one that runs here; start this program again")

    def _why_not_ready(self, error: BaseException) -> str | None:
        """None when it is this process that was interrupted."""
        match error:
            case TimeoutError():
                return f"not ready after {self.limits.start:g} s"
            case EOFError() | OSError():
                return self.how_it_ended("its start")
            case WireError():
                return str(error)
        return None


class _Tail:
    """The last of what a process writes to stderr, as far back as 16 reads."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        self._stream = process.stderr
        self._chunks: deque[bytes] = deque(maxlen=16)
        self._thread = threading.Thread(target=self._drain, name="kvtape-host-stderr", daemon=True)
        self._thread.start()

    def last_line(self) -> str:
        """Of what was written until the end of the process; at most 200 characters."""
        self._thread.join(_TAIL_SECONDS)
        text = b"".join(self._chunks).decode("utf-8", "replace")
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
        return _FOLDERS.sub("", last)[:200]

    def _drain(self) -> None:
        with self._stream:
            while chunk := os.read(self._stream.fileno(), 4096):
                self._chunks.append(chunk)


def _spawn(module: str, control: int, cancels: int) -> subprocess.Popen[bytes]:
    # A kernel that kills the host with "its parent" means the thread that started it: only the main one lasts.
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    command = [sys.executable, "-P", "-m", module, str(control), str(cancels), str(parent)]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(control, cancels),
            process_group=0,
            env={**_QUIET, **os.environ, "PYTHONPATH": path},
        )
    except (OSError, ValueError) as err:
        raise EnvironmentProblem(
            f"the engine host does not start: {err}; free some memory, or run without --isolate"
        ) from None


def _end(owner: int, process: subprocess.Popen[bytes], control: socket.socket, cancels: int, tail: _Tail) -> None:
    """Whatever happened: no process, no zombie, no descriptor is left. A fork of the owner leaves its host alone."""
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    control.close()
    os.close(cancels)
    tail.last_line()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
