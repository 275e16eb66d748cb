"""The application: paths to endpoints, each a few lines over what is asked and told."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from kvtape.serve.http.access import Access
from kvtape.serve.http.asking import ask_chat, ask_completion, read_body
from kvtape.serve.http.document import openapi
from kvtape.serve.http.failures import Refused, failed, failure_of
from kvtape.serve.http.gate import BodyLimits, Gate
from kvtape.serve.http.metrics import Metrics
from kvtape.serve.http.shapes import Chat, Completion, Health, ModelCard, ModelList
from kvtape.serve.http.telling import ChatTeller, Teller, TextTeller, events, whole
from kvtape.serve.requests import End, GenerationRequest, Piece, Service, ServiceError

__all__ = ["make_app"]

Endpoint = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


def make_app(service: Service, access: Access, *, version: str, limits: BodyLimits | None = None) -> ASGIApp:
    """`version` of kvtape, for the document."""
    front = _Front(service, openapi(service.model_name, version, keys=bool(access.digests)))
    routes = [
        Route("/v1/chat/completions", front.answered(front.chat), methods=["POST"]),
        Route("/v1/completions", front.answered(front.completion), methods=["POST"]),
        Route("/v1/models", front.models, methods=["GET"]),
        Route("/v1/models/{model:path}", front.answered(front.model), methods=["GET"]),
        Route("/health", front.health, methods=["GET"]),
        Route("/metrics", front.metrics, methods=["GET"]),
        Route("/openapi.json", front.document, methods=["GET"]),
    ]
    # Not `Starlette`: its outermost layer would answer an unexpected error itself.
    handlers: Any = {404: front.no_path, 405: front.no_method}
    return Gate(ExceptionMiddleware(Router(routes), handlers), access, limits or BodyLimits(), front.failed)


class _Front:
    def __init__(self, service: Service, document: dict[str, Any]) -> None:
        self._service = service
        self._document = document
        self._metrics = Metrics(service)
        self._created = _wall_s()

    def answered(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint, with its failures as answers."""

        async def answer(request: Request) -> Response:
            try:
                return await endpoint(request)
            except Refused as refused:
                failure = refused.failure
            except ServiceError as err:
                failure = failure_of(err)
            self.failed(failure.code)
            return failure.response()

        return answer

    def failed(self, code: str) -> None:
        self._metrics.failed(code)

    async def no_path(self, request: Request, err: HTTPException) -> Response:
        self.failed("not_found")
        return failed("not_found", "no such path; see /openapi.json").response()

    async def no_method(self, request: Request, err: HTTPException) -> Response:
        self.failed("method_not_allowed")
        return failed("method_not_allowed", "this path has other methods", headers=err.headers or {}).response()

    async def chat(self, request: Request) -> Response:
        body = read_body(Chat, await _json_of(request))
        self._check_model(body.model)
        asked = await ask_chat(self._service, body, request)
        teller = ChatTeller(self._head("chatcmpl"), logprobs=asked.logprobs is not None)
        return await self._generated(request, asked, teller, body)

    async def completion(self, request: Request) -> Response:
        body = read_body(Completion, await _json_of(request))
        self._check_model(body.model)
        asked = await ask_completion(self._service, body, request)
        teller = TextTeller(self._head("cmpl"), logprobs=asked.logprobs is not None)
        return await self._generated(request, asked, teller, body)

    async def models(self, request: Request) -> Response:
        return JSONResponse(ModelList(data=[self._card()]).model_dump())

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._card().model_dump())

    async def health(self, request: Request) -> Response:
        status = self._service.status()
        told = Health(status="ok" if status.ready else "unavailable", running=status.running, waiting=status.waiting)
        return JSONResponse(told.model_dump(), 200 if status.ready else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def document(self, request: Request) -> Response:
        return JSONResponse(self._document)

    # -- steps ----------------------------------------------------------------------------------------------------

    async def _generated(
        self, request: Request, asked: GenerationRequest, teller: Teller, body: Chat | Completion
    ) -> Response:
        told = self._measured(asked)
        if not body.stream:
            return JSONResponse((await _unless_gone(request, whole(teller, told))).model_dump())
        # The first thing that comes decides the status.
        first = await _unless_gone(request, anext(told))
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        return _Events(events(teller, _after(first, told), self.failed, with_usage=with_usage))

    async def _measured(self, asked: GenerationRequest) -> AsyncGenerator[Piece | End]:
        began = time.monotonic()
        first, ended = True, False
        try:
            async with aclosing(self._service.generate(asked)) as told:
                async for item in told:
                    if isinstance(item, End):
                        ended = True
                        self._metrics.ended(item, time.monotonic() - began)
                    elif first:
                        first = False
                        self._metrics.first_text(time.monotonic() - began)
                    yield item
        except (asyncio.CancelledError, GeneratorExit):
            if not ended:
                self._metrics.abandoned()
            raise

    def _check_model(self, name: str) -> None:
        if name != self._service.model_name:
            raise Refused(
                failed("model_not_found", f"this server has the model {self._service.model_name!r} alone", "model")
            )

    def _card(self) -> ModelCard:
        return ModelCard(id=self._service.model_name, created=self._created, max_model_len=self._service.n_ctx)

    def _head(self, prefix: str) -> dict[str, Any]:
        number = f"{prefix}-{secrets.token_hex(12)}"
        return {"id": number, "created": _wall_s(), "model": self._service.model_name}


class _Events(StreamingResponse):
    """Server-sent events; when the client leaves, the turn ends with the stream."""

    def __init__(self, stream: AsyncGenerator[bytes]) -> None:
        super().__init__(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stream.aclose()


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What `work` gives; it is cancelled when the client leaves first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise asyncio.CancelledError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _json_of(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(failed("unsupported_media_type", "the body must be application/json"))
    return await request.body()


async def _after(first: Piece | End, rest: AsyncGenerator[Piece | End]) -> AsyncGenerator[Piece | End]:
    async with aclosing(rest):
        yield first
        async for item in rest:
            yield item


def _wall_s() -> int:
    """Seconds since 1970: what clients are told, nothing that is recorded."""
    return int(time.time())  # noqa: TID251
