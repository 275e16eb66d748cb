"""A server of feed-forward layers over HTTP: `kvtape ffn-server`, the other end of `RemoteFfn`.

    GET  /v1/info   {"schema", "arch", "model", "n_layer", "n_embd", "max_rows"}
    POST /v1/ffn    a frame in, a frame out (`ffn_frames`)

It holds no session and asks for no secret, so it listens on the loopback interface alone; another machine reaches it
through a tunnel. What it takes is bounded: bytes of a request, seconds of a silent client, connections. Rows are
computed by one request at a time, on one BLAS thread, with the bits of the same layers computed locally.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Final

from kvtape.backends.errors import EnvironmentProblem, UsageError
from kvtape.backends.reference.blas import one_blas_thread
from kvtape.backends.reference.ffn import LocalFfn
from kvtape.backends.reference.ffn_frames import (
    CONTENT_TYPE,
    MAX_ROWS,
    FfnFrame,
    FrameError,
    frame_bytes,
    model_key,
)
from kvtape.backends.reference.weights import Weights

__all__ = ["INFO_SCHEMA", "FfnServer"]

INFO_SCHEMA: Final = "kvtape.ffn-server/1"

_SILENT_S: Final = 60.0
_MAX_CONNECTIONS: Final = 32
_BUSY: Final = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Refused(Exception):
    """A request that gets an answer, but not rows."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class FfnServer(ThreadingHTTPServer):
    """`port` 0 takes a free one. Raises UsageError for a host that is not loopback, EnvironmentProblem for a port that
    is taken. `silent_s`: seconds that a client may say nothing.
    """

    daemon_threads = True

    def __init__(
        self, weights: Weights, host: str = "127.0.0.1", port: int = 0, *, silent_s: float = _SILENT_S
    ) -> None:
        if weights.dtype != "float32":
            raise UsageError("frames are float32; open the model in float32 to serve it")
        address = _loopback(host)
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.weights, self.silent_s, self.key = weights, silent_s, model_key(weights)
        self._local, self._computing = LocalFfn(weights), threading.Lock()
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        try:
            super().__init__((address, port), _Handler)
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
        return frame_bytes(MAX_ROWS, self.weights.architecture.shape.n_embd)

    def info(self) -> Mapping[str, Any]:
        shape = self.weights.architecture.shape
        return {
            "schema": INFO_SCHEMA,
            "arch": shape.arch,
            "model": self.key.hex(),
            "n_layer": shape.n_layer,
            "n_embd": shape.n_embd,
            "max_rows": MAX_ROWS,
        }

    def answer(self, frame: FfnFrame) -> FfnFrame:
        """Raises Refused for rows that are not of this model."""
        shape = self.weights.architecture.shape
        if frame.model != self.key:
            raise Refused(HTTPStatus.CONFLICT, f"this server has another model ({shape.arch})")
        if not frame.layer < shape.n_layer or frame.rows.shape[1] != shape.n_embd:
            raise Refused(HTTPStatus.BAD_REQUEST, f"layers are 0..{shape.n_layer - 1}, rows have {shape.n_embd}")
        with self._computing, one_blas_thread():
            return FfnFrame(frame.layer, self.key, self._local.feed(frame.layer, frame.rows))

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


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: FfnServer

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.silent_s)

    def do_GET(self) -> None:
        if self.path == "/v1/info":
            self._send(HTTPStatus.OK, json.dumps(self.server.info()).encode(), "application/json")
        else:
            self._refuse(Refused(HTTPStatus.NOT_FOUND, "GET /v1/info or POST /v1/ffn"))

    def do_POST(self) -> None:
        try:
            body = self._body()
            answer = self.server.answer(FfnFrame.decode(body)).encode()
        except Refused as err:
            self._refuse(err)
        except FrameError as err:
            self._refuse(Refused(HTTPStatus.BAD_REQUEST, str(err)))
        except (OSError, TimeoutError):
            self.close_connection = True
        except Exception as err:
            self._refuse(Refused(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(err).__name__}: {err}"))
        else:
            self._send(HTTPStatus.OK, answer, CONTENT_TYPE)

    def _body(self) -> bytes:
        """Refused before a byte of it is read, where it is not what this server takes."""
        length = self.headers.get("Content-Length", "")
        if self.path != "/v1/ffn":
            raise Refused(HTTPStatus.NOT_FOUND, "POST /v1/ffn")
        if self.headers.get("Content-Type") != CONTENT_TYPE:
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"send {CONTENT_TYPE}")
        if not length.isascii() or not length.isdecimal():
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length")
        if len(length) > 12 or int(length) > self.server.max_bytes:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {self.server.max_bytes} bytes a request")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionResetError("the client went away in the middle of its request")
        return body

    def _refuse(self, refused: Refused) -> None:
        """The connection ends: its body may not have been read."""
        self.close_connection = True
        self._send(refused.status, json.dumps({"error": refused.why}).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base names it so)
        """Nothing: a decode makes a request for every layer."""


def _loopback(host: str) -> str:
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        address = None
    if address is None or not address.is_loopback:
        raise UsageError(f"host {host!r} is not loopback; the server has no lock, so it stays on 127.0.0.1 or ::1")
    return str(address)
