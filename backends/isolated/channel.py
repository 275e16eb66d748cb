"""Calls from this process into the host, over one socket: a request, the choices it asks for, its answer.

    here                                          host
    ["call", operation, cancels, arguments]  -->
                                             <--  ["choose", logits]      decode_until only, once a token
    ["token", token] or ["raised"]           -->
                                             <--  ["ok", value], ["error", packed] or ["raised"]

While the host waits for a token it also serves other calls, so `choose` may look at the session.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from kvtape.backends.errors import EngineFault, FatalClass, InputRejected, SessionClosed
from kvtape.backends.isolated.failures import unpack_error
from kvtape.backends.isolated.frames import receive, send
from kvtape.backends.isolated.process import HostProcess
from kvtape.backends.isolated.values import Unsendable, WireError
from kvtape.backends.protocol import Choose

__all__ = ["Channel"]

Result = TypeVar("Result")


class Channel:
    """One call at a time; a call from another thread waits.

    When the host dies, hangs or answers nonsense it is ended for good, and that call and every later one raise
    EngineFault device_lost with the first cause. A failure that the engine itself reported stays the cause as well. A
    call that is interrupted here (Ctrl-C) leaves its answer unread: from then on only `close` is possible.
    """

    def __init__(
        self,
        sock: socket.socket,
        host: HostProcess,
        session: int,
        patience: float,
        *,
        lock: threading.RLock | None = None,
    ) -> None:
        """`patience`: seconds without a sign of life, in a call, that end the host. `lock`: one of somebody who closes
        the socket; a call holds it."""
        self._sock, self._host, self._session, self._patience = sock, host, session, patience
        sock.settimeout(patience)
        self._lock = lock or threading.RLock()
        self._cancels = 0
        self._fault: EngineFault | None = None
        self._unread = False
        self._closed = False
        weakref.finalize(self, sock.close)

    def call(
        self,
        kind: type[Result],
        operation: str,
        arguments: Sequence[object] = (),
        *,
        choose: Choose | None = None,
        passing: socket.socket | None = None,
    ) -> Result:
        """The operation's result, which is a `kind`. Raises what the engine raised, InputRejected for what cannot be
        sent, EngineFault device_lost; SessionClosed after `close`. `passing` goes along and belongs to the host then.
        """
        with self._lock:
            self._require_usable(operation)
            request = ["call", operation, self._cancels, list(arguments)]
            with self._guarded(operation):
                self._send(request)
                if passing is not None:
                    socket.send_fds(self._sock, [b"F"], [passing.fileno()])
                answer, raised = self._answer(choose)
            return self._result(kind, operation, answer, raised)

    @property
    def usable(self) -> bool:
        """Whether another call can be made."""
        return self._fault is None and not self._unread and not self._closed

    def cancel(self) -> None:
        """Stop the running call, or the next one before it begins. From any thread."""
        if self._host.cancel(self._session):
            self._cancels += 1

    def close(self) -> None:
        """End the session in the host and wait until its memory is free. Idempotent.

        A host that takes too long is killed, with every other session that it has.
        """
        if self._closed:
            return
        self._closed = True
        if self._unread or not self._lock.acquire(blocking=False):
            self.cancel()
            self._lock.acquire()
        try:
            self._sock.settimeout(self._host.limits.close)
            self._part()
        except BaseException:
            self._host.kill()
            raise
        finally:
            self._sock.close()
            self._lock.release()

    def _part(self) -> None:
        """The host closes its end once the session is closed; whatever it still had to say is dropped."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
            while self._sock.recv(1 << 16):
                pass
        except TimeoutError:
            self._host.kill()
        except OSError:
            pass  # the host is dead

    def _require_usable(self, operation: str) -> None:
        if self._fault is not None:
            raise self._fault
        if self._closed:
            raise SessionClosed("the session's native context was closed")
        if self._unread:
            raise SessionClosed(
                f"{operation}: an earlier call was interrupted before it was answered; close the session"
            )

    def _send(self, message: object) -> None:
        try:
            send(self._sock, message)
        except Unsendable as err:
            raise InputRejected(str(err)) from None

    def _answer(self, choose: Choose | None) -> tuple[Any, BaseException | None]:
        """The last message of a call, and what `choose` raised in it."""
        raised: BaseException | None = None
        while True:
            match receive(self._sock):
                case ["choose", logits] if choose is not None and raised is None:
                    raised = self._choose(choose, logits)
                case ["ok" | "error" | "raised", *_] as answer:
                    return answer, raised
                case message:
                    raise WireError(f"an answer {str(message)[:80]!r}")

    def _choose(self, choose: Choose, logits: Any) -> BaseException | None:
        """Ask and pass the token on; whatever is raised is given back, for the host must undo the run first."""
        raised: BaseException
        try:
            token = choose(logits)
        except BaseException as err:
            raised = err
        else:
            try:
                self._send(["token", token])
                return None
            except InputRejected as err:
                raised = err
        send(self._sock, ["raised"])
        return raised

    def _result(self, kind: type[Result], operation: str, answer: Any, raised: BaseException | None) -> Result:
        match answer:
            case ["ok", value] if isinstance(value, kind):
                return value
            case ["raised"] if raised is not None:
                raise raised
            case ["error", packed]:
                with self._guarded(operation):
                    error = unpack_error(packed)
                if isinstance(error, EngineFault):
                    self._fault = error
                raise error from raised
        with self._guarded(operation):
            raise WireError(f"a result {str(answer)[:80]!r}")

    @contextlib.contextmanager
    def _guarded(self, operation: str) -> Iterator[None]:
        """What can go wrong between two processes, as the fault that it is."""
        try:
            yield
        except InputRejected:
            raise  # before a byte was sent
        except TimeoutError:
            self._host.kill()
            self._lose(f"did not answer within {self._patience:g} s in {operation} and was killed")
        except (OSError, EOFError):
            if self._closed:
                raise SessionClosed(f"{operation}: the session was closed meanwhile") from None
            self._lose(self._host.how_it_ended(operation))
        except (WireError, MemoryError) as err:
            self._host.kill()
            self._lose(f"gave an answer that makes no sense in {operation} and was killed: {err}")
        except BaseException:
            self._unread = True
            raise

    def _lose(self, how: str) -> NoReturn:
        if self._fault is None:
            self._fault = EngineFault(FatalClass.DEVICE_LOST, f"the engine host {how}")
        raise self._fault from None
