"""One connection: who is slow to ask or slow to read is let go, and what is no HTTP gets an answer of the one shape."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from kvtape.serve.http.failures import Failure, failed

__all__ = ["Connection", "Patience"]


@dataclass(frozen=True, slots=True)
class Patience:
    """`headers_s`: seconds in which a request's headers must have come. `stall_s`: in which a client whose answer
    fills the buffers (64 KiB) must have read three quarters of them. `connections`: how many may be open at once.
    `last_s`: in which those that are open at the server's end must be done, once nothing is computed for them any more.
    """

    headers_s: float = 10.0
    stall_s: float = 30.0
    connections: int = 512
    last_s: float = 30.0


class Connection(H11Protocol):
    """uvicorn's, with limits. A connection too many is refused whatever it asks."""

    def __init__(self, patience: Patience, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._patience = patience
        self._asking: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._is_too_many = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_too_many = len(self.connections) > self._patience.connections
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_too_many:  # answered only now: a connection that is closed on unread data is reset
            headers = {"Retry-After": "1"}
            self._refuse(failed("too_many_requests", "too many connections are open", headers=headers))
            return
        super().data_received(data)
        self._await_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # What was sent ahead of this answer's end is the beginning of a request that nobody times yet.
        if self.conn.trailing_data[0]:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._asking, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            # Not `close`: that waits until all is read.
            self._stalled = self.loop.call_later(self._patience.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(failed("invalid_request", "this is not HTTP/1.1, or its headers are longer than 64 KiB"))

    # -- steps ----------------------------------------------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_headers(self) -> None:
        """A timer from a request's first byte to the last of its headers."""
        if self._is_answering:
            if self._asking is not None:
                self._asking.cancel()
                self._asking = None
        elif self._asking is None:
            self._asking = self.loop.call_later(self._patience.headers_s, self._give_up)

    def _give_up(self) -> None:
        self._asking = None
        if not self._is_answering and not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, failure: Failure) -> None:
        """Answer and close, whatever was or was not asked."""
        if self._is_answering:
            self.transport.close()
            return
        body = failure.text().encode()
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
            *failure.headers.items(),
        ]
        said = b"".join(f"{name}: {value}\r\n".encode("ascii") for name, value in headers)
        self.transport.write(
            f"HTTP/1.1 {failure.status} {HTTPStatus(failure.status).phrase}\r\n".encode("ascii") + said + b"\r\n" + body
        )
        self.transport.close()
