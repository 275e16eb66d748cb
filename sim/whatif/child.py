"""A process of one's own that works for this one: what is sent to it, what comes back, and its certain end.

It has a session of its own, so that a Ctrl-C on the terminal is this process's alone, and it ends by itself when this
process is gone, however that came: its standard input then has an end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

__all__ = ["Child", "end_with_parent", "link_to_parent"]


class Child:
    """`python -m module FD`, which talks over the socket FD. `link` is waited for; an EOFError there is its death."""

    def __init__(self, module: str) -> None:
        self.link, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        # What this process can import, the other can: a policy may be a function in the caller's folder.
        self.tell([str(Path(entry).absolute()) for entry in sys.path])

    def tell(self, value: Any) -> None:
        """Send `value`. A dead child is found out when it is listened to."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.link.send(value)

    def hear(self) -> Any:
        """What it sent. Raises EOFError when it is gone."""
        try:
            return self.link.recv()
        except ConnectionResetError:
            raise EOFError from None

    def how_it_ended(self) -> str:
        """Words for its death; waits for it."""
        code = self._process.wait()
        if code >= 0:
            return f"ended with code {code}"
        name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else str(-code)
        return f"was killed by {name}"

    def end(self, *, grace_s: float = 0) -> None:
        """End it: by the signal that it may clean up on, where it has `grace_s` seconds for that. Idempotent."""
        self.link.close()
        if grace_s:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def link_to_parent(arguments: list[str]) -> Connection:
    """In the child: the way to its parent, with the parent's import path taken over."""
    link = Connection(int(arguments[0]))
    sys.path[:] = link.recv()
    return link


def end_with_parent(signum: int = signal.SIGKILL) -> None:
    """In the child: from now on it ends by `signum` when its parent is gone."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signum)

    threading.Thread(target=watch, daemon=True).start()
