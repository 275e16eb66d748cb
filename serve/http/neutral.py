"""Fields of OpenAI's, llama.cpp's and vLLM's API that this server does not act on, and what asks for nothing in each.

Null always asks for nothing. A field of these with another value is refused with its words in `WORDS`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field, JsonValue

__all__ = ["WORDS", "NeutralChat", "NeutralCompletion", "NeutralGeneration"]

_Zero = Annotated[float, Field(ge=0, le=0, allow_inf_nan=False)]
_One = Annotated[float, Field(ge=1, le=1, allow_inf_nan=False)]
_Nothing = Annotated[dict[str, JsonValue], Field(max_length=0)]
_Empty = Annotated[list[JsonValue], Field(max_length=0)]


class NeutralGeneration(BaseModel):
    """Of both ways of asking."""

    n: Literal[1] | None = None
    frequency_penalty: _Zero | None = None
    presence_penalty: _Zero | None = None
    repetition_penalty: _One | None = None
    repeat_penalty: _One | None = None
    length_penalty: _One | None = None
    dry_multiplier: _Zero | None = None
    logit_bias: _Nothing | None = None
    top_k: Literal[-1, 0] | None = None
    min_p: _Zero | None = None
    typical_p: _One | None = None
    dynatemp_range: _Zero | None = None
    xtc_probability: _Zero | None = None
    mirostat: Literal[0] | None = None
    use_beam_search: Literal[False] | None = None
    min_tokens: Literal[0] | None = None
    ignore_eos: Literal[False] | None = None
    stop_token_ids: _Empty | None = None
    include_stop_str_in_output: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    prompt_logprobs: None = None
    cache_prompt: Literal[True] | None = None
    grammar: Literal[""] | None = None
    structured_outputs: None = None
    guided_json: None = None
    guided_regex: None = None
    guided_choice: None = None
    guided_grammar: None = None


class NeutralChat(BaseModel):
    """Of a chat."""

    tool_choice: Literal["auto", "none"] | None = None
    functions: _Empty | None = None
    function_call: Literal["auto", "none"] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    audio: None = None
    prediction: None = None
    moderation: None = None
    web_search_options: None = None
    chat_template: None = None
    chat_template_kwargs: _Nothing | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None


class NeutralCompletion(BaseModel):
    """Of a completion."""

    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


_PENALTIES = "this server does no penalties"
_SAMPLERS = "of the samplers this server has temperature and top_p"
_CONSTRAINED = "this server does not constrain what is written"
_ONE_ANSWER = "this server gives one answer a request"
_ENDS = "an answer ends at the model's end token, a stop string or max_tokens"
_FUNCTIONS = "this server takes tools, and never makes the model call one"
_TEXT = "this server reads and writes text alone"
_TEMPLATE = "the chat template is the server's, and always opens the next answer"

WORDS: Final = {
    "n": _ONE_ANSWER,
    "best_of": _ONE_ANSWER,
    "use_beam_search": _ONE_ANSWER,
    "frequency_penalty": _PENALTIES,
    "presence_penalty": _PENALTIES,
    "repetition_penalty": _PENALTIES,
    "repeat_penalty": _PENALTIES,
    "length_penalty": _PENALTIES,
    "dry_multiplier": _PENALTIES,
    "logit_bias": "this server biases no token",
    "top_k": _SAMPLERS,
    "min_p": _SAMPLERS,
    "typical_p": _SAMPLERS,
    "dynatemp_range": _SAMPLERS,
    "xtc_probability": _SAMPLERS,
    "mirostat": _SAMPLERS,
    "min_tokens": _ENDS,
    "ignore_eos": _ENDS,
    "stop_token_ids": _ENDS,
    "include_stop_str_in_output": "a stop string is never part of the answer",
    "skip_special_tokens": "whether control tokens are told is not a client's to set",
    "prompt_logprobs": "log probabilities are those of the answer's tokens",
    "echo": "the prompt is never part of the answer",
    "suffix": "this server does not fill in between two texts",
    "cache_prompt": "what a prompt shares with a session is always used",
    "grammar": _CONSTRAINED,
    "structured_outputs": _CONSTRAINED,
    "guided_json": _CONSTRAINED,
    "guided_regex": _CONSTRAINED,
    "guided_choice": _CONSTRAINED,
    "guided_grammar": _CONSTRAINED,
    "response_format": _CONSTRAINED,
    "tool_choice": _FUNCTIONS,
    "functions": _FUNCTIONS,
    "function_call": _FUNCTIONS,
    "store": "answers are not kept to be asked for again",
    "service_tier": "this server has one tier",
    "reasoning_effort": "how long the model reasons is not this server's to set",
    "verbosity": "how much the model says is not this server's to set",
    "modalities": _TEXT,
    "audio": _TEXT,
    "prediction": "this server takes no predicted outputs",
    "moderation": "this server moderates nothing",
    "web_search_options": "this server searches nothing",
    "chat_template": _TEMPLATE,
    "chat_template_kwargs": _TEMPLATE,
    "add_generation_prompt": _TEMPLATE,
    "continue_final_message": _TEMPLATE,
}
"""Why a field is refused."""
