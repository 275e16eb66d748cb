"""From what a service gives to bodies: whole, or as server-sent events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel

from kvtape.serve.http.failures import failure_of
from kvtape.serve.http.shapes import (
    AnswerMessage,
    CachedTokens,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    CompletionText,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
    TopLogprob,
    UsageBody,
)
from kvtape.serve.requests import End, Piece, ServiceError, TokenChoice, Usage

__all__ = ["ChatTeller", "Teller", "TextTeller", "events", "whole"]


class Teller(ABC):
    """`head` is what every body of one answer has: id, created, model."""

    def __init__(self, head: dict[str, Any], *, logprobs: bool) -> None:
        self.head = head
        self.logprobs = logprobs

    @abstractmethod
    def answer(self, text: str, choices: Sequence[TokenChoice], end: End) -> BaseModel:
        """The whole answer."""

    def begin(self) -> BaseModel | None:
        """An event before any text."""
        return None

    @abstractmethod
    def part(self, piece: Piece) -> BaseModel:
        """An event with new text."""

    @abstractmethod
    def finish(self, end: End) -> BaseModel:
        """The event that says why it ended."""

    @abstractmethod
    def usage(self, end: End) -> BaseModel:
        """The event with the counts, where they were asked for."""


async def whole(teller: Teller, told: AsyncGenerator[Piece | End]) -> BaseModel:
    """Raises what the service raises."""
    text: list[str] = []
    choices: list[TokenChoice] = []
    async with aclosing(told):
        async for item in told:
            if isinstance(item, End):
                return teller.answer("".join(text), choices, item)
            text.append(item.text)
            choices += item.choices
    raise AssertionError("a service ends with an End")


async def events(
    teller: Teller, told: AsyncGenerator[Piece | End], failed: Callable[[str], None], *, with_usage: bool
) -> AsyncGenerator[bytes]:
    """Server-sent events; a failure after the first is an event too, since the status was sent. `failed` is told its
    code."""
    begin = teller.begin()
    if begin is not None:
        yield _event(begin)
    try:
        async with aclosing(told):
            async for item in told:
                if isinstance(item, Piece):
                    yield _event(teller.part(item))
                    continue
                yield _event(teller.finish(item))
                if with_usage:
                    yield _event(teller.usage(item))
    except ServiceError as err:
        failure = failure_of(err)
        failed(failure.code)
        yield b"data: " + failure.text().encode() + b"\n\n"
        return
    yield b"data: [DONE]\n\n"


def _event(body: BaseModel) -> bytes:
    return b"data: " + body.model_dump_json(exclude_unset=True).encode() + b"\n\n"


class ChatTeller(Teller):
    def answer(self, text: str, choices: Sequence[TokenChoice], end: End) -> BaseModel:
        choice = ChatChoice(
            message=AnswerMessage(content=text), logprobs=self._logprobs(choices), finish_reason=end.reason
        )
        return ChatCompletion(**self.head, choices=[choice], usage=_usage(end.usage))

    def begin(self) -> BaseModel:
        return self._chunk(ChatDelta(role="assistant", content=""), None)

    def part(self, piece: Piece) -> BaseModel:
        return self._chunk(ChatDelta(content=piece.text), None, self._logprobs(piece.choices))

    def finish(self, end: End) -> BaseModel:
        return self._chunk(ChatDelta(), end)

    def usage(self, end: End) -> BaseModel:
        return ChatChunk(**self.head, object="chat.completion.chunk", choices=[], usage=_usage(end.usage))

    def _chunk(self, delta: ChatDelta, end: End | None, logprobs: ChatLogprobs | None = None) -> BaseModel:
        choice = ChatChunkChoice(
            index=0, delta=delta, logprobs=logprobs, finish_reason=None if end is None else end.reason
        )
        return ChatChunk(**self.head, object="chat.completion.chunk", choices=[choice])

    def _logprobs(self, choices: Sequence[TokenChoice]) -> ChatLogprobs | None:
        if not self.logprobs:
            return None
        return ChatLogprobs(
            content=[
                TokenLogprob(
                    token=c.text,
                    logprob=c.logprob,
                    bytes=_bytes(c.text),
                    top_logprobs=[TopLogprob(token=t, logprob=p, bytes=_bytes(t)) for _, t, p in c.top],
                )
                for c in choices
            ],
            refusal=None,
        )


class TextTeller(Teller):
    def __init__(self, head: dict[str, Any], *, logprobs: bool) -> None:
        super().__init__(head, logprobs=logprobs)
        self._offset = 0

    def answer(self, text: str, choices: Sequence[TokenChoice], end: End) -> BaseModel:
        return self._body(text, choices, end.reason, _usage(end.usage))

    def part(self, piece: Piece) -> BaseModel:
        return self._body(piece.text, piece.choices, None)

    def finish(self, end: End) -> BaseModel:
        return self._body("", (), end.reason)

    def usage(self, end: End) -> BaseModel:
        return CompletionText(**self.head, object="text_completion", choices=[], usage=_usage(end.usage))

    def _body(
        self, text: str, choices: Sequence[TokenChoice], reason: Any, usage: UsageBody | None = None
    ) -> BaseModel:
        logprobs = self._logprobs(choices) if self.logprobs else None
        choice = TextChoice(index=0, text=text, logprobs=logprobs, finish_reason=reason)
        body = CompletionText(**self.head, object="text_completion", choices=[choice])
        return body if usage is None else body.model_copy(update={"usage": usage})

    def _logprobs(self, choices: Sequence[TokenChoice]) -> TextLogprobs:
        offsets = []
        for choice in choices:
            offsets.append(self._offset)
            self._offset += len(choice.text)
        return TextLogprobs(
            text_offset=offsets,
            token_logprobs=[c.logprob for c in choices],
            tokens=[c.text for c in choices],
            top_logprobs=[{t: p for _, t, p in c.top} for c in choices],
        )


def _usage(usage: Usage) -> UsageBody:
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=CachedTokens(cached_tokens=usage.cached_tokens),
    )


def _bytes(text: str) -> list[int] | None:
    """None for a part of a character, whose bytes the text does not show."""
    return None if "�" in text else list(text.encode())
