"""Feed-forward layers computed by a server: the router for `kvtape ffn-server`.

A call is a pure function of its rows, so whatever did not come back may be asked for again. What is tried again, and
how often, is bounded: `attempts`, with waits that double up to a cap, and a deadline for each attempt.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Final
from urllib.parse import urlsplit

import numpy as np

from kvtape.backends.errors import UsageError
from kvtape.backends.reference.blas import Floats
from kvtape.backends.reference.errors import BackendFailure, BackendUnavailable, ExecutionRefused
from kvtape.backends.reference.ffn_frames import (
    CONTENT_TYPE,
    MAX_ROWS,
    FfnFrame,
    FrameError,
    frame_bytes,
    model_key,
)
from kvtape.backends.reference.weights import Weights

__all__ = ["RemoteFfn", "Retry"]

_ERROR_BYTES: Final = 2000
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


class RemoteFfn:
    """The layers of `weights`' model at `url` (`http://HOST:PORT`). One thread at a time; nothing is sent before the
    first call, so the server may start later, and come and go between calls.
    """

    def __init__(
        self, url: str, weights: Weights, retry: Retry | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        if weights.dtype != np.float32:
            raise ExecutionRefused("unsupported", "rows travel as float32; open the model in float32")
        self.url = url.rstrip("/")
        self.name = f"remote {self.url}"
        self._host, self._port = _place(url)
        self._key = model_key(weights)
        self._retry, self._sleep = retry or Retry(), sleep
        self._connection: HTTPConnection | None = None

    def feed(self, layer: int, h: Floats) -> Floats:
        """Raises BackendUnavailable where no attempt was answered, BackendFailure for an answer that cannot be used,
        ExecutionRefused where the server has another model.
        """
        out = np.empty_like(h)
        for start in range(0, len(h), MAX_ROWS):
            rows = h[start : start + MAX_ROWS]
            out[start : start + MAX_ROWS] = self._asked(FfnFrame(layer, self._key, rows))
        return out

    def close(self) -> None:
        """Give the connection back; a later call opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _asked(self, frame: FfnFrame) -> Floats:
        request, why = frame.encode(), ""
        for attempt in range(self._retry.attempts):
            if attempt:
                self._sleep(self._retry.wait(attempt))
            try:
                status, body = self._exchange(request, frame_bytes(*frame.rows.shape))
            except (OSError, HTTPException) as err:
                self.close()
                why = _said(err)
                continue
            except BaseException:
                # A half-read answer must not be taken for that of the next call.
                self.close()
                raise
            return self._rows(frame, status, body)
        tries = f"{self._retry.attempts} attempt{'s' * (self._retry.attempts != 1)}"
        raise BackendUnavailable(
            f"{self.url}: no feed-forward server answered in {tries} ({why}); start it with kvtape ffn-server"
        )

    def _exchange(self, request: bytes, expected: int) -> tuple[int, bytes]:
        """Status and body: the rows' frame of 200, the beginning of what was said of any other."""
        deadline = time.monotonic() + self._retry.timeout_s
        connection = self._connection or self._connected()
        connection.request("POST", "/v1/ffn", request, {"Content-Type": CONTENT_TYPE})
        response = connection.getresponse()
        if response.status == 503:
            raise ConnectionRefusedError("the server is busy")
        if response.status == 200 and response.length is None:
            raise ConnectionResetError("the answer ended in the middle")
        if response.status != 200:
            self.close()
            return response.status, response.read(_ERROR_BYTES)
        if response.length != expected:
            self.close()
            raise BackendFailure(f"{self.url}: an answer of {response.length} bytes where {expected} were due")
        return 200, _read(response, expected, deadline)

    def _connected(self) -> HTTPConnection:
        """A new connection, to a server that says it has this model."""
        connection = HTTPConnection(self._host, self._port, timeout=self._retry.timeout_s)
        self._connection = connection
        connection.request("GET", "/v1/info")
        response = connection.getresponse()
        if response.status == 503:
            raise ConnectionRefusedError("the server is busy")
        theirs = _field(response.read(_INFO_BYTES), "model")
        if response.status != 200 or theirs is None:
            self.close()
            raise BackendFailure(f"{self.url}: what answers there is not kvtape ffn-server")
        if theirs != self._key.hex():
            self.close()
            raise ExecutionRefused("binding_defect", f"{self.url} serves another model; start one for this model")
        return connection

    def _rows(self, asked: FfnFrame, status: int, body: bytes) -> Floats:
        if status != 200:
            said = _field(body, "error") or "an answer that is not of kvtape ffn-server"
            raise BackendFailure(f"{self.url}: {said} (status {status})")
        try:
            answer = FfnFrame.decode(body)
        except FrameError as err:
            self.close()
            raise BackendFailure(f"{self.url}: {err}") from None
        if (answer.layer, answer.model, answer.rows.shape) != (asked.layer, asked.model, asked.rows.shape):
            self.close()
            raise BackendFailure(f"{self.url}: rows of layer {answer.layer} where layer {asked.layer} was asked")
        return answer.rows


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


def _field(body: bytes, name: str) -> str | None:
    """A text of the answer's JSON as one line; None where it has none."""
    with suppress(ValueError, KeyError, TypeError):
        return " ".join(str(json.loads(body)[name]).split())
    return None
