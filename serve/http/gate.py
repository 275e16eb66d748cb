"""What every request passes before an endpoint sees it: host, key, size, time; and what every error passes after it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtape.serve.defects import place_of
from kvtape.serve.http.access import Access
from kvtape.serve.http.failures import Failure, Refused, failed
from kvtape.serve.requests import ServiceError

__all__ = ["BodyLimits", "Gate"]

_OPEN = frozenset({"/health"})
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """`body_bytes` of a request's body; `body_s`: seconds in which it must have arrived; `headers`: how many."""

    body_bytes: int = 4 * 1024 * 1024
    body_s: float = 30.0
    headers: int = 100


class Gate:
    """An ASGI application around another. The body is read here, whole: an endpoint finds it in one piece."""

    def __init__(
        self, app: ASGIApp, access: Access, limits: BodyLimits, refused: Callable[[str], None] = lambda code: None
    ) -> None:
        """`refused` is told the code of each failure that no endpoint tells."""
        self._app = app
        self._refused = refused
        self._access = access
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began = False

        async def watched(message: Message) -> None:
            nonlocal began
            began = began or message["type"] == "http.response.start"
            await send(message)

        try:
            self._check(scope)
            body = await self._read(scope, receive)
            scope["app"] = self  # a router raises its 404 and 405 only inside an application
            await self._app(scope, _replayed(body, receive), watched)
        except Refused as refused:
            await self._answer(refused.failure, scope, receive, send)
        except (asyncio.CancelledError, ServiceError):
            raise
        except Exception as err:
            number = secrets.token_hex(4)
            # The text of an unexpected error may hold a path or a part of a prompt; its kind and place do not.
            _log.error("request %s failed: %s at %s", number, type(err).__name__, place_of(err))
            if began:
                raise ConnectionAbortedError(number) from None
            await self._answer(
                failed("internal_error", f"a defect of the server, number {number}"), scope, receive, send
            )

    def _check(self, scope: Scope) -> None:
        headers = scope["headers"]
        if len(headers) > self._limits.headers:
            raise Refused(failed("invalid_request", f"more than {self._limits.headers} headers"))
        found = {name: value.decode("latin-1") for name, value in headers}
        if b"content-length" in found and b"transfer-encoding" in found:
            # A proxy in front may see another end of this body than this server does.
            raise Refused(failed("invalid_request", "Content-Length and Transfer-Encoding: give one of them"))
        if not self._access.is_host(found.get(b"host", "")):
            raise Refused(failed("wrong_host", "the Host header names another host than this server's"))
        keys = [value for name, value in headers if name == b"authorization"]
        if scope["path"] not in _OPEN and not self._access.allows(keys):
            challenge = {"WWW-Authenticate": "Bearer"}
            raise Refused(failed("invalid_api_key", "give a key of this server as Bearer token", headers=challenge))

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        most = self._limits.body_bytes
        too_large = Refused(failed("body_too_large", f"a body has at most {most} bytes"))
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise asyncio.CancelledError
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            why = f"the body did not arrive within {self._limits.body_s:g} s"
            raise Refused(failed("request_timeout", why)) from None

    async def _answer(self, failure: Failure, scope: Scope, receive: Receive, send: Send) -> None:
        self._refused(failure.code)
        response = failure.response()
        # What is left of a refused body would be read as the next request.
        response.headers["Connection"] = "close"
        await response(scope, receive, send)


def _replayed(body: bytes, receive: Receive) -> Receive:
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
