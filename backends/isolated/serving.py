"""Inside the host: one session served on one socket, and the cancels that overtake its calls."""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from kvtape.backends.isolated.backend import OPERATIONS
from kvtape.backends.isolated.failures import pack_error
from kvtape.backends.isolated.frames import CANCEL, receive, send
from kvtape.backends.isolated.values import Unsendable, wire_version
from kvtape.backends.protocol import Backend, Logits

__all__ = ["CancelDesk", "SessionServer", "answer", "answer_all", "die"]


class CancelDesk:
    """Cancels come over a pipe of their own, for the session's thread is busy when they matter.

    A request says how many cancels went before it; it begins once they have been handed on, so that a cancel of the
    next operation stops it however the threads run. The pipe's end is the end of the parent: then this process ends
    at once, whatever it is computing.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe = os.fdopen(pipe, "rb")
        self._changed = threading.Condition()
        self._sessions: dict[int, Callable[[], None]] = {}
        self._handed_on: defaultdict[int, int] = defaultdict(int)
        threading.Thread(target=self._run, name="cancels", daemon=True).start()

    def register(self, session: int, cancel: Callable[[], None]) -> None:
        with self._changed:
            self._sessions[session] = cancel

    def forget(self, session: int) -> None:
        with self._changed:
            self._sessions.pop(session, None)
            self._handed_on.pop(session, None)

    def wait_for(self, session: int, count: int) -> None:
        """Return once `count` cancels of this session were handed on."""
        with self._changed:
            self._changed.wait_for(lambda: self._handed_on[session] >= count)

    def _run(self) -> None:
        try:
            while len(record := self._pipe.read(CANCEL.size)) == CANCEL.size:
                self._hand_on(*CANCEL.unpack(record))
        except BaseException:
            die()
        os._exit(0)

    def _hand_on(self, session: int) -> None:
        with self._changed:
            if session in self._sessions:
                self._sessions[session]()
                self._handed_on[session] += 1
                self._changed.notify_all()


class _ChoiceRaised(Exception):
    """`choose` raised in the parent: the engine undoes the run, the parent raises its own error again."""


class _ParentGone(BaseException):
    """The parent closed this session in the middle of a call; not for an engine to catch."""


class SessionServer:
    """Serves `backend` until the parent closes the socket, then closes it and the socket."""

    def __init__(self, sock: socket.socket, session: int, backend: Backend, desk: CancelDesk) -> None:
        self._sock, self._session, self._backend, self._desk = sock, session, backend, desk
        desk.register(session, backend.cancel)

    def run(self) -> None:
        """The body of the session's thread."""
        try:
            try:
                while True:
                    self._serve(receive(self._sock))
            except (EOFError, OSError, _ParentGone):
                pass
            self._desk.forget(self._session)
            self._backend.close()
            self._sock.close()
        except BaseException:
            die()

    def _serve(self, message: Any) -> None:
        _, operation, cancels, arguments = message
        if operation not in OPERATIONS:
            raise ValueError(f"no operation {operation!r}")
        if operation in ("decode_until", "verify"):
            arguments.append(self._choose)
        self._desk.wait_for(self._session, cancels)
        answer(self._sock, lambda: getattr(self._backend, operation)(*arguments))

    def _choose(self, logits: Logits) -> Any:
        try:
            send(self._sock, ["choose", logits])
            while True:
                match receive(self._sock):
                    case ["token", token]:
                        return token
                    case ["raised"]:
                        raise _ChoiceRaised
                    case message:
                        self._serve(message)
        except (EOFError, OSError) as err:
            raise _ParentGone from err


def answer(sock: socket.socket, work: Callable[[], object]) -> None:
    """Do the work and send what came of it. Raises OSError or _ParentGone when nobody listens any more."""
    try:
        reply: list[object] = ["ok", work()]
    except _ChoiceRaised:
        reply = ["raised"]
    except Exception as err:
        reply = ["error", pack_error(err)]
    try:
        send(sock, reply)
    except Unsendable as err:
        send(sock, ["error", pack_error(err)])


def answer_all(control: socket.socket, find: Callable[[str], Callable[..., object]]) -> None:
    """Say that the host is ready, then do each operation that comes, by `find` of its name; until the parent closes."""
    send(control, ["ready", wire_version()])
    while True:
        try:
            _, operation, _, arguments = receive(control)
        except EOFError:
            return
        answer(control, partial(find(operation), *arguments))


def die() -> NoReturn:
    """End the process as one that is not to be trusted any more, with the reason on stderr."""
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(70)
