"""The host process: `python -m kvtape.backends.isolated.host CONTROL CANCELS PARENT`.

It loads engines and opens sessions as it is told over the socket CONTROL; each session is served by a thread on a
socket of its own. It ignores Ctrl-C, which is the parent's to act on, and ends with the parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from importlib import import_module
from typing import Any

from kvtape.backends.isolated.opened import Opened
from kvtape.backends.isolated.serving import CancelDesk, SessionServer, answer_all, die
from kvtape.backends.protocol import Engine, SessionConfig

__all__ = ["Host", "main"]

_PR_SET_PDEATHSIG = 1


class Host:
    """Engines by number, as the parent numbers them."""

    def __init__(self, control: socket.socket, desk: CancelDesk) -> None:
        self._control, self._desk = control, desk
        self._engines: dict[int, Engine] = {}

    def run(self) -> None:
        """Serve until the parent closes the control socket, then free the engines."""
        answer_all(self._control, lambda operation: getattr(self, f"_{operation}"))
        for engine in self._engines.values():
            engine.close()

    def _load(self, number: int, loader: str, name: str, options: dict[str, str], path: str) -> dict[str, Any]:
        module, _, function = loader.partition(":")
        engine: Engine = getattr(import_module(module), function)(name, path, options)
        self._engines[number] = engine
        return {"name": engine.name, "version": engine.version, "facts": engine.facts}

    def _tokenize(self, number: int, text: str) -> list[int]:
        return self._engines[number].tokenize(text)

    def _detokenize(self, number: int, tokens: list[int]) -> str:
        return self._engines[number].detokenize(tokens)

    def _open(self, number: int, session: int, config: SessionConfig) -> Opened:
        _, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        sock = socket.socket(fileno=fds[0])
        try:
            backend = self._engines[number].open(config)
        except BaseException:
            sock.close()
            raise
        server = SessionServer(sock, session, backend, self._desk)
        threading.Thread(target=server.run, name=f"session-{session}", daemon=True).start()
        return Opened.of(backend)

    def _unload(self, number: int) -> None:
        self._engines.pop(number).close()


def main(arguments: list[str]) -> None:
    """Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control, cancels, parent = (int(a) for a in arguments)
    try:
        if parent:
            _end_with(parent)
        Host(socket.socket(fileno=control), CancelDesk(cancels)).run()
    except BaseException:
        die()
    # Not through the interpreter's end: threads of closed sessions and of engines may still be there.
    os._exit(0)


def _end_with(parent: int) -> None:
    """Where the kernel can, have it kill this process when the parent dies: even a hung native call is ended then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
