"""What a server's front asks of whoever computes, and what it gets back; no HTTP and no engine in here.

    front (HTTP)  --GenerationRequest-->  Service  --Piece, Piece, ..., End-->  front

Token counts are the engine's. A text is told in pieces that are whole characters and hold no part of a stop string.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from kvtape.planner.blocks import PromptSegment

__all__ = [
    "BadPrompt",
    "Deadline",
    "End",
    "EngineGone",
    "GenerationRequest",
    "Overloaded",
    "Piece",
    "Sampling",
    "Service",
    "ServiceError",
    "ServiceStatus",
    "ShuttingDown",
    "TokenChoice",
    "TooLong",
    "Usage",
]


@dataclass(frozen=True, slots=True)
class Sampling:
    """`temperature` 0 is greedy. `top_p` in (0, 1]. `seed` None: drawn by the service, and told in `End`."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One turn.

    `segments` with their tokens, in order: the whole prompt. `max_tokens` at least 1. `logprobs`: how many
    alternatives of each token to tell, 0 for the chosen one alone, None for no log-probabilities. `session`: the
    client's own name of the conversation; None finds the session that shares the longest prefix.
    """

    segments: tuple[PromptSegment, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """A token that was generated: `logprob` natural, of the untempered distribution; `top` descending."""

    token: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is new, and the choices behind it where log-probabilities were asked for."""

    text: str
    choices: tuple[TokenChoice, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """All counts in tokens; `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class End:
    """How generation ended: an end token or a stop string (`stop`), or `max_tokens` or the context (`length`)."""

    reason: Literal["stop", "length"]
    usage: Usage
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """Of one moment. `resident_tokens` over all slots of `capacity_tokens`; `ready` while requests are taken.

    `counters` since the start, by name: see `serve.counting`.
    """

    ready: bool
    running: int
    waiting: int
    slots: int
    resident_tokens: int
    capacity_tokens: int
    counters: Mapping[str, int] = field(default_factory=dict)


class ServiceError(Exception):
    """Why a request is not served; the text is for the client, and holds nothing of the host and of other requests."""


class BadPrompt(ServiceError):
    """What was given cannot be made a prompt: no chat template, one that refuses these messages, ids out of range."""


class TooLong(ServiceError):
    """The prompt and one token more do not fit, and the policy gives nothing up."""


class Overloaded(ServiceError):
    """The queue is full; try again in `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Deadline(ServiceError):
    """The request took longer than it may."""


class ShuttingDown(ServiceError):
    """No new requests; those that run are finished."""


class EngineGone(ServiceError):
    """The engine failed under this request; its session is closed, and another request may go on."""


class Service(Protocol):
    """Whoever computes. Nothing here blocks the event loop.

    `model_name` is what clients call the model; `n_ctx` the context of a session, tokens, as far as the
    model was trained for it.
    """

    model_name: str
    n_ctx: int

    async def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[PromptSegment, ...]:
        """Messages `{role, content, ...}` through the model's chat template, with the cue for the answer; segments of
        kind system, tools, user, assistant, tool, assistant_prompt. Control tokens that a content spells stay text.
        Raises BadPrompt.
        """

    async def text_prompt(self, text: str) -> tuple[PromptSegment, ...]:
        """A plain text, with the token that begins a text where the model wants one. Raises BadPrompt."""

    def token_prompt(self, tokens: Sequence[int]) -> tuple[PromptSegment, ...]:
        """Ids as they are. Raises BadPrompt for one outside the vocabulary."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Piece | End]:
        """Pieces, then one End. Closing the iterator early cancels the turn and gives its slot back.

        Raises ServiceError: before the first piece where nothing was computed, Deadline and EngineGone also later.
        """

    def status(self) -> ServiceStatus:
        """How busy it is."""

    async def close(self) -> None:
        """Refuse new requests, finish what runs or cancel it after the grace time, end every session. Idempotent."""

    def hurry(self) -> None:
        """Cancel what runs: a `close` need not wait for it."""
