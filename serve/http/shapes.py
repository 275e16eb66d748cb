"""Request and response bodies, as OpenAI's API has them; from these the published document is made.

A field that this server does not act on is known all the same (`neutral`): with a value that asks for nothing it is
taken, with any other it is refused by name. A field that nobody knows is refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from kvtape.serve.http.neutral import NeutralChat, NeutralCompletion, NeutralGeneration

__all__ = [
    "Chat",
    "ChatChunk",
    "ChatCompletion",
    "Completion",
    "CompletionText",
    "ErrorBody",
    "Health",
    "Message",
    "ModelCard",
    "ModelList",
    "StreamOptions",
    "TextFormat",
    "TextPart",
]

_TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    """One message. `developer` is the newer name of `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, JsonValue]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextFormat(_Body):
    type: Literal["text"]


class _Generation(_Body, NeutralGeneration):
    """What both ways of asking have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    user: str | None = None


class Chat(_Generation, NeutralChat):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=16384)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, JsonValue]], Field(max_length=128)] | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, JsonValue] | None = None


class Completion(_Generation, NeutralCompletion):
    """Body of `POST /v1/completions`: `prompt` is a text, or token ids."""

    prompt: str | Annotated[list[_TokenId], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


# -- answers ------------------------------------------------------------------------------------------------------


class CachedTokens(BaseModel):
    cached_tokens: int


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


Finish = Literal["stop", "length"]


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int = 0
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(BaseModel):
    """Answer of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class ChatChunk(BaseModel):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None


class TextLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class TextChoice(BaseModel):
    index: int = 0
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Finish | None


class CompletionText(BaseModel):
    """Answer of `POST /v1/completions`, and one event of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody | None = None


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """Every failure."""

    error: ErrorObject


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvtape"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok", "unavailable"]
    running: int
    waiting: int
