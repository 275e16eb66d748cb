"""From a body that was read to what a service is asked."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from kvtape.serve.http.failures import Failure, Refused, failed
from kvtape.serve.http.neutral import WORDS
from kvtape.serve.http.shapes import Chat, Completion, Message, StreamOptions, TextFormat, TextPart
from kvtape.serve.requests import BadPrompt, GenerationRequest, Sampling, Service

__all__ = ["SESSION_HEADER", "SESSION_NAME", "ask_chat", "ask_completion", "read_body"]

SESSION_HEADER = "X-Kvtape-Session"
"""The client's own name of a conversation: its session goes on, whatever the prompt shares with others."""

SESSION_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SHORTEST_DEFAULT = 16
"""`max_tokens` of a completion where none is asked, as OpenAI's API has it."""

Body = TypeVar("Body", bound=BaseModel)


def read_body(kind: type[Body], raw: bytes) -> Body:
    """Raises Refused, naming the first field that is wrong."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as err:
        raise Refused(_wrong(err)) from None


def _wrong(err: ValidationError) -> Failure:
    errors = err.errors(include_url=False, include_context=False)
    # Of the branches of a union the one that got furthest is the one that was meant.
    first = max(errors, key=lambda e: len(_shown(e)))
    param = ".".join(_shown(first))[:200] or None
    if first["type"] == "json_invalid":
        return failed("invalid_request", f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if first["type"] == "extra_forbidden":
        return failed("unsupported", f"{param}: this server has no such field", param)
    place = first["loc"]
    field = str(place[0]) if place else ""
    if field in WORDS:
        return failed("unsupported", f"{param}: {WORDS[field]}", param)
    if field == "prompt" and len(place) > 2 and isinstance(first["input"], str | list):
        return failed("unsupported", "prompt: one prompt a request, a text or a list of token ids", "prompt")
    if param == "prompt":
        return failed("invalid_request", "prompt: a text or a list of token ids, and not without any", "prompt")
    return failed("invalid_request", f"{param or 'the body'}: {first['msg']}", param)


def _shown(error: ErrorDetails) -> list[str]:
    """Its place as a client knows it; pydantic names the branches of a union too."""
    unknown = error["type"] == "extra_forbidden"
    last = len(error["loc"]) - 1
    return [
        str(part)
        for i, part in enumerate(error["loc"])
        if isinstance(part, int) or part in _NAMES or (unknown and i == last)
    ]


_NAMES = frozenset(
    name for shape in (Chat, Completion, Message, StreamOptions, TextFormat, TextPart) for name in shape.model_fields
)


async def ask_chat(service: Service, body: Chat, request: Request) -> GenerationRequest:
    """Raises Refused, BadPrompt."""
    if body.top_logprobs is not None and not body.logprobs:
        raise Refused(failed("invalid_request", "top_logprobs: needs logprobs to be true", "top_logprobs"))
    messages = [_plain(message, i) for i, message in enumerate(body.messages)]
    segments = await service.chat_prompt(messages, body.tools or ())
    most = body.max_completion_tokens or body.max_tokens
    return GenerationRequest(
        segments=segments,
        max_tokens=most or service.n_ctx,  # under a policy that evicts nothing a full context ends it before
        sampling=_sampling(body),
        stop=_stops(body.stop),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        session=_session(request),
    )


async def ask_completion(service: Service, body: Completion, request: Request) -> GenerationRequest:
    """Raises Refused, BadPrompt."""
    if isinstance(body.prompt, str):
        segments = await service.text_prompt(body.prompt)
    else:
        segments = service.token_prompt(body.prompt)
    return GenerationRequest(
        segments=segments,
        max_tokens=body.max_tokens or _SHORTEST_DEFAULT,
        sampling=_sampling(body),
        stop=_stops(body.stop),
        logprobs=body.logprobs,
        session=_session(request),
    )


def _plain(message: Message, place: int) -> dict[str, Any]:
    """A message as chat templates expect it: content a text, `developer` called `system`."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if content is None:
        if message.role != "assistant" or not message.tool_calls:
            raise BadPrompt(f"message {place} ({message.role}) has no content")
        content = ""
    told = message.model_dump(exclude_none=True, exclude={"refusal"})
    return told | {"content": content, "role": "system" if message.role == "developer" else message.role}


def _sampling(body: Chat | Completion) -> Sampling:
    seed = None if body.seed is None else body.seed % 2**64
    temperature = 1.0 if body.temperature is None else body.temperature
    return Sampling(temperature, body.top_p or 1.0, seed)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def _session(request: Request) -> str | None:
    name = request.headers.get(SESSION_HEADER)
    if name is None:
        return None
    if not SESSION_NAME.fullmatch(name):
        why = f"{SESSION_HEADER}: a name is 1 to 128 letters, digits and . _ : -"
        raise Refused(failed("invalid_request", why, SESSION_HEADER))
    return name
