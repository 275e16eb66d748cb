"""Calls to `kvtape ffn-server` that may be repeated: bounded attempts, a deadline for each, typed errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from kvtape.backends.errors import UsageError
from kvtape.backends.reference.errors import BackendFailure, BackendUnavailable, ExecutionRefused

__all__ = ["Caller", "Reply", "Retry", "json_text"]

_INFO_BYTES: Final = 10_000
_PIECE_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class Retry:
    """`attempts` in all, each within `timeout_s`; waits between them: `wait_s`, doubled each time, up to a longest."""

    attempts: int = 4
    timeout_s: float = 30.0
    wait_s: float = 0.05
    longest_wait_s: float = 1.0

    def wait(self, attempt: int) -> float:
        """Seconds before the second attempt, which is 1, the third, ..."""
        return min(self.longest_wait_s, self.wait_s * 2.0 ** (attempt - 1))


class Reply(NamedTuple):
    status: int
    body: bytes


class Caller:
    """One connection, opened at the first call and again after any trouble; one thread at a time.

    A new connection is asked for its model first: `key`, or nothing is sent to it.
    """

    def __init__(self, url: str, key: bytes, retry: Retry | None, sleep: Callable[[float], None] = time.sleep) -> None:
        self._host, self._port = _place(url)
        self.url = url.rstrip("/")
        self._key, self._retry, self._sleep = key, retry or Retry(), sleep
        self._connection: HTTPConnection | None = None

    def call(self, method: str, path: str, body: bytes, content_type: str, max_bytes: int) -> Reply:
        """The answer, whatever its status but 503; of at most `max_bytes`.

        Raises BackendUnavailable where no attempt was answered, BackendFailure for an answer too large or from somebody
        else, ExecutionRefused where the server has another model.
        """
        why = ""
        for attempt in range(self._retry.attempts):
            if attempt:
                self._sleep(self._retry.wait(attempt))
            try:
                return self._exchange(method, path, body, content_type, max_bytes)
            except (OSError, HTTPException) as err:
                self.close()
                why = _said(err)
            except BaseException:
                # A half-read answer must not be taken for that of the next call.
                self.close()
                raise
        tries = f"{self._retry.attempts} attempt{'s' * (self._retry.attempts != 1)}"
        raise BackendUnavailable(
            f"{self.url}: no feed-forward server answered in {tries} ({why}); start it with kvtape ffn-server"
        )

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _exchange(self, method: str, path: str, body: bytes, content_type: str, max_bytes: int) -> Reply:
        deadline = time.monotonic() + self._retry.timeout_s
        connection = self._connection or self._connected()
        connection.request(method, path, body, {"Content-Type": content_type})
        response = connection.getresponse()
        if response.status == 503:
            raise ConnectionRefusedError("the server is busy")
        length = response.length
        if length is None:
            raise ConnectionResetError("the answer ended in the middle")
        if length > max_bytes:
            raise BackendFailure(f"{self.url}: an answer of {length} bytes where {max_bytes} at most were due")
        reply = Reply(response.status, _read(response, length, deadline))
        # `read1` leaves it open at its end, and a connection with an open answer takes no further request.
        response.close()
        if response.will_close:
            self.close()
        return reply

    def _connected(self) -> HTTPConnection:
        connection = HTTPConnection(self._host, self._port, timeout=self._retry.timeout_s)
        self._connection = connection
        connection.request("GET", "/v1/info")
        response = connection.getresponse()
        if response.status == 503:
            raise ConnectionRefusedError("the server is busy")
        theirs = json_text(response.read(_INFO_BYTES), "model")
        if response.status != 200 or theirs is None:
            raise BackendFailure(f"{self.url}: what answers there is not kvtape ffn-server")
        if theirs != self._key.hex():
            raise ExecutionRefused("binding_defect", f"{self.url} serves another model; start one for this model")
        return connection


def json_text(body: bytes, name: str) -> str | None:
    """A text of an answer's JSON as one line; None where it has none."""
    with suppress(ValueError, KeyError, TypeError):
        return " ".join(str(json.loads(body)[name]).split())
    return None


def _read(response: HTTPResponse, n: int, deadline: float) -> bytes:
    """`n` bytes before the deadline, however slowly they come. Raises OSError, HTTPException."""
    parts: list[bytes] = []
    while n:
        if time.monotonic() > deadline:
            raise TimeoutError("the answer came too slowly")
        part = response.read1(min(n, _PIECE_BYTES))
        if not part:
            raise ConnectionResetError("the answer ended in the middle")
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def _place(url: str) -> tuple[str, int]:
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/"):
            return parts.hostname, parts.port
    raise UsageError(f"{url!r} is no address of a feed-forward server; write http://HOST:PORT")


def _said(err: BaseException) -> str:
    return (getattr(err, "strerror", None) or str(err) or type(err).__name__).lower()
