"""Every way in which a request can fail, as a status and a body of one shape; the body says nothing of the host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.responses import Response

from kvtape.serve.requests import (
    BadPrompt,
    Deadline,
    EngineGone,
    Overloaded,
    ServiceError,
    ShuttingDown,
    TooLong,
)

__all__ = ["FAILURES", "Failure", "Refused", "failed", "failure_of"]


@dataclass(frozen=True, slots=True)
class Failure:
    """An HTTP status and OpenAI's error object: `type` is its family, `code` the exact kind."""

    status: int
    message: str
    type: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, object]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def text(self) -> str:
        # Lone surrogates of a quoted field name have no UTF-8; escaped they go through.
        return json.dumps(self.body())

    def response(self) -> Response:
        return Response(self.text(), self.status, dict(self.headers), "application/json")


class Refused(Exception):
    """A request that is answered with a failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


FAILURES: Mapping[str, tuple[int, str]] = {
    "invalid_request": (400, "the body is no JSON object of this endpoint, or a field is not what it may be (`param`)"),
    "unsupported": (400, "a field asks for something that this server does not do (`param`)"),
    "invalid_prompt": (400, "the messages or ids make no prompt for this model"),
    "context_length_exceeded": (400, "the prompt does not fit, and the policy evicts nothing"),
    "invalid_api_key": (401, "no key, or none of the server's"),
    "wrong_host": (403, "the Host header names another host: a page in a browser may have been rebound to this server"),
    "not_found": (404, "no such path"),
    "model_not_found": (404, "another model than the one that is served"),
    "method_not_allowed": (405, "the path has other methods"),
    "request_timeout": (408, "the body did not arrive in time, or the answer took longer than a request may"),
    "body_too_large": (413, "more bytes than a body may have"),
    "unsupported_media_type": (415, "a body that is not application/json"),
    "too_many_requests": (429, "as many requests wait as may; `Retry-After` says when to try again"),
    "internal_error": (500, "a defect of the server; the id stands in its log"),
    "unavailable": (503, "the server is shutting down, or the engine failed under this request; send it again"),
}
"""Code -> status, and when it comes. Documented from here."""

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}

_CODES: Mapping[type[ServiceError], str] = {
    BadPrompt: "invalid_prompt",
    TooLong: "context_length_exceeded",
    Overloaded: "too_many_requests",
    Deadline: "request_timeout",
    ShuttingDown: "unavailable",
    EngineGone: "unavailable",
}


def failed(code: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None) -> Failure:
    """A failure by its code."""
    status = FAILURES[code][0]
    return Failure(status, message, _TYPES.get(status, "invalid_request_error"), code, param, headers or {})


def failure_of(err: ServiceError) -> Failure:
    """What a service's error is to a client."""
    headers = {}
    if isinstance(err, Overloaded):
        headers = {"Retry-After": str(err.retry_after_s)}
    elif isinstance(err, ShuttingDown | EngineGone):
        headers = {"Retry-After": "1"}
    return failed(_CODES[type(err)], str(err), headers=headers)
