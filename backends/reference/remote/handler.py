"""The HTTP side of `ffn_server`: what is read from a connection, bounded, and what is written back."""

from __future__ import annotations

import ipaddress
import json
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from kvtape.backends.errors import KvtapeError
from kvtape.backends.reference.remote.frames import FrameError
from kvtape.backends.reference.remote.session_host import problem

__all__ = ["Answer", "FfnHandler", "Refused", "Request", "is_loopback"]

_JSON = "application/json"


class Refused(Exception):
    """A request that gets an answer, but not what it asked for."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


def is_loopback(host: str) -> bool:
    """`localhost`, or an address of this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Request(NamedTuple):
    method: str
    path: str
    content_type: str
    body: bytes


class Answer(NamedTuple):
    body: bytes
    content_type: str = _JSON


class Responder(Protocol):
    """What the handler needs of its server."""

    silent_s: float

    @property
    def max_bytes(self) -> int:
        """Of a request's body."""

    def respond(self, request: Request) -> Answer:
        """Raises Refused, FrameError, KvtapeError."""


class FfnHandler(BaseHTTPRequestHandler):
    """Whatever goes wrong is an answer; only a client that went away, or says nothing, is not answered."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: Any

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self._responder.silent_s)

    def do_DELETE(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def _serve(self) -> None:
        try:
            answer = self._responder.respond(
                Request(self.command, self.path, self.headers.get("Content-Type", ""), self._body())
            )
        except Refused as err:
            self._refuse(err.status, json.dumps({"error": err.why}).encode())
        except FrameError as err:
            self._refuse(HTTPStatus.BAD_REQUEST, json.dumps({"error": str(err)}).encode())
        except KvtapeError as err:
            self._send(HTTPStatus.UNPROCESSABLE_ENTITY, Answer(problem(err)))
        except OSError:
            self.close_connection = True
        except Exception as err:
            said = f"{type(err).__name__}: {err}"
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, json.dumps({"error": said}).encode())
        else:
            self._send(HTTPStatus.OK, answer)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base names it so)
        """Nothing: a decode makes a request for every layer."""

    @property
    def _responder(self) -> Responder:
        responder: Responder = self.server
        return responder

    def _body(self) -> bytes:
        """Refused before a byte of it is read, where it is more than this server takes, or meant for another host."""
        if not is_loopback(_name(self.headers.get("Host", ""))):
            # A page whose name was made to lead here: its browser takes this server for the page's own.
            raise Refused(HTTPStatus.FORBIDDEN, "call this server by a loopback address or as localhost")
        length = self.headers.get("Content-Length", "0" if self.command in ("GET", "DELETE") else "")
        if not length.isascii() or not length.isdecimal():
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length")
        if len(length) > 12 or int(length) > self._responder.max_bytes:
            most = self._responder.max_bytes
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {most} bytes a request")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionResetError("the client went away in the middle of its request")
        return body

    def _refuse(self, status: HTTPStatus, body: bytes) -> None:
        """The connection ends: the request's body may not have been read."""
        self.close_connection = True
        self._send(status, Answer(body))

    def _send(self, status: HTTPStatus, answer: Answer) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(answer.body)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(answer.body)
            self.wfile.flush()
        except OSError:
            self.close_connection = True


def _name(host: str) -> str:
    """Of a `Host` header, without its port; empty for what is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
