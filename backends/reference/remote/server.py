"""A server of feed-forward layers, and of sessions, over HTTP: `kvtape ffn-server`.

    GET    /v1/info                      {"schema", "arch", "model", "n_layer", "n_embd", "max_rows"}
    POST   /v1/ffn                       a frame in, a frame out (`ffn_frames`): the other end of `RemoteFfn`
    PUT    /v1/sessions/NAME             {"spec", "tokens"} in, a frame of the last row out: `RemoteEngine`
    POST   /v1/sessions/NAME/step        {"tokens": [one], "n_tokens"} in, the same out
    GET    /v1/sessions/NAME             memory and counters
    GET    /v1/sessions/NAME/rows/L/P    a frame of a key and a value row, laid end to end; null where none is held
    DELETE /v1/sessions/NAME

It asks for no secret, so it listens on the loopback interface alone; another machine reaches it through a tunnel. What
it takes is bounded: bytes of a request, seconds of a silent client, connections, sessions. One request computes at a
time, on one BLAS thread, with the bits of the same layers computed locally.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Final

import numpy as np

from kvtape.backends.errors import EnvironmentProblem, UsageError
from kvtape.backends.reference.model.blas import Floats, one_blas_thread
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.weights import Weights
from kvtape.backends.reference.remote.frames import CONTENT_TYPE, MAX_ROWS, FfnFrame, frame_bytes, model_key
from kvtape.backends.reference.remote.handler import Answer, FfnHandler, Refused, Request, is_loopback
from kvtape.backends.reference.remote.session_host import SessionHost

__all__ = ["INFO_SCHEMA", "SESSION_TYPE", "FfnServer"]

INFO_SCHEMA: Final = "kvtape.ffn-server/1"
SESSION_TYPE: Final = "application/vnd.kvtape.session+json"

_SILENT_S: Final = 60.0
_MAX_CONNECTIONS: Final = 32
_BUSY: Final = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_SESSION: Final = re.compile(r"/v1/sessions/([0-9a-f]{32})(?:/(step)|/rows/(\d{1,9})/(\d{1,9}))?", re.ASCII)


class FfnServer(ThreadingHTTPServer):
    """`port` 0 takes a free one. Raises UsageError for a host that is not loopback, EnvironmentProblem for a port that
    is taken. `silent_s`: seconds that a client may say nothing.
    """

    daemon_threads = True

    def __init__(
        self, weights: Weights, host: str = "127.0.0.1", port: int = 0, *, silent_s: float = _SILENT_S
    ) -> None:
        if weights.dtype != np.float32:
            raise UsageError("frames are float32; open the model in float32 to serve it")
        if not is_loopback(host):
            raise UsageError(f"host {host!r} is not loopback; the server has no lock, so it stays on 127.0.0.1 or ::1")
        address = "127.0.0.1" if host == "localhost" else host
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.silent_s, self._weights, self._key = silent_s, weights, model_key(weights)
        self._local, self._sessions, self._computing = LocalFfn(weights), SessionHost(weights), threading.Lock()
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        try:
            super().__init__((address, port), FfnHandler)
        except OSError as err:
            why = (err.strerror or str(err)).lower()
            raise EnvironmentProblem(f"cannot listen on {host} port {port}: {why}; choose another port") from None

    def server_bind(self) -> None:
        """Without the base's question to the name service."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    @property
    def url(self) -> str:
        host = f"[{self.server_name}]" if self.address_family == socket.AF_INET6 else self.server_name
        return f"http://{host}:{self.server_port}"

    @property
    def max_bytes(self) -> int:
        return frame_bytes(MAX_ROWS, self._weights.architecture.shape.n_embd)

    def info(self) -> Mapping[str, Any]:
        shape = self._weights.architecture.shape
        return {
            "schema": INFO_SCHEMA,
            "arch": shape.arch,
            "model": self._key.hex(),
            "n_layer": shape.n_layer,
            "n_embd": shape.n_embd,
            "max_rows": MAX_ROWS,
        }

    def respond(self, request: Request) -> Answer:
        session = _SESSION.fullmatch(request.path)
        if (request.method, request.path) == ("GET", "/v1/info"):
            return Answer(json.dumps(self.info()).encode())
        if (request.method, request.path) == ("POST", "/v1/ffn"):
            _demand(request, CONTENT_TYPE)
            return self._fed(FfnFrame.decode(request.body))
        if session:
            with self._computing, one_blas_thread():
                return self._of_session(request, *session.groups())
        raise Refused(HTTPStatus.NOT_FOUND, f"no {request.method} {request.path}; see the documentation of ffn-server")

    def _fed(self, frame: FfnFrame) -> Answer:
        shape = self._weights.architecture.shape
        if frame.model != self._key:
            raise Refused(HTTPStatus.CONFLICT, f"this server has another model ({shape.arch})")
        if not frame.layer < shape.n_layer or frame.rows.shape[1] != shape.n_embd:
            raise Refused(HTTPStatus.BAD_REQUEST, f"layers are 0..{shape.n_layer - 1}, rows have {shape.n_embd}")
        with self._computing, one_blas_thread():
            return self._framed(self._local.feed(frame.layer, frame.rows), frame.layer)

    def _of_session(
        self, request: Request, name: str, step: str | None, layer: str | None, position: str | None
    ) -> Answer:
        match request.method, step, layer:
            case "PUT", None, None:
                return self._framed(self._sessions.begin(name, _json(request)))
            case "POST", "step", None:
                return self._framed(self._sessions.step(name, _json(request)))
            case "GET", None, None:
                return Answer(json.dumps(self._sessions.told(name)).encode())
            case "GET", None, str():
                return self._row(name, int(layer), int(position or 0))
            case "DELETE", None, None:
                self._sessions.end(name)
                return Answer(b"{}")
        raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"no {request.method} there")

    def _row(self, name: str, layer: int, position: int) -> Answer:
        try:
            row = self._sessions.row(name, layer, position)
        except IndexError as err:
            raise Refused(HTTPStatus.BAD_REQUEST, str(err)) from None
        if row is None:
            return Answer(b"null")
        return self._framed(np.concatenate([part.ravel() for part in row])[None], layer)

    def _framed(self, rows: Floats, layer: int = 0) -> Answer:
        return Answer(FfnFrame(layer, self._key, rows).encode(), CONTENT_TYPE)

    def process_request(self, request: Any, client_address: Any) -> None:
        """One thread a connection, up to a bound."""
        if not self._free.acquire(blocking=False):
            request.sendall(_BUSY)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the server's."""


def _demand(request: Request, content_type: str) -> None:
    if request.content_type != content_type:
        raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"send {content_type}")


def _json(request: Request) -> Any:
    _demand(request, SESSION_TYPE)
    try:
        return json.loads(request.body)
    except (ValueError, RecursionError):
        raise Refused(HTTPStatus.BAD_REQUEST, "the body is no JSON") from None
