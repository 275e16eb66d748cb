"""Pipelines of `openvino_genai` that somebody else made and drives: what they reveal, and no more. Only ever read.

They reveal counts of tokens, times, how full a cache is and how a request ended; never which tokens are resident, what
of a prompt was reused, or how they were configured.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = [
    "PIPELINES",
    "Answer",
    "Cache",
    "Prompted",
    "Usage",
    "answers",
    "cache_of",
    "ended_as",
    "engine_version",
    "is_running",
    "pipeline_kind",
    "prompted",
    "scheduler_facts",
    "tokens_in",
    "usage_of",
]

PIPELINES: Final = ("ContinuousBatchingPipeline", "LLMPipeline")
_FAMILY: Final = "openvino_genai"


def pipeline_kind(thing: object) -> str | None:
    """Which of `PIPELINES` it is; None for anything else. openvino_genai is not imported for the answer."""
    for c in type(thing).__mro__:
        if c.__module__.split(".")[0] == _FAMILY and c.__qualname__ in PIPELINES:
            return c.__qualname__
    return None


def engine_version() -> str:
    return f"openvino-genai {sys.modules[_FAMILY].get_version()}"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens in and out as the engine counted them, and its times in nanoseconds where it took them."""

    prompt_tokens: int
    completion_tokens: int
    first_token_ns: int | None
    total_ns: int | None


def usage_of(result: object) -> Usage | None:
    """Of a result or a request's handle; None where it bears no figures, as a plain text does."""
    metrics: Any = getattr(result, "perf_metrics", None)
    if metrics is None:
        ask = getattr(result, "get_perf_metrics", None)
        metrics = None if ask is None else ask()
    if metrics is None:
        return None
    said = int(metrics.get_num_generated_tokens())
    return Usage(
        int(metrics.get_num_input_tokens()),
        said,
        _nanoseconds(metrics.get_ttft().mean) if said else None,
        _nanoseconds(metrics.get_generate_duration().mean),
    )


def _nanoseconds(milliseconds: float) -> int | None:
    return round(milliseconds * 1e6) if milliseconds > 0 else None


def ended_as(result: object) -> str | None:
    """Why it ended, in the engine's own words: reasons of one result, or a request's status."""
    reasons = getattr(result, "finish_reasons", None)
    if reasons:
        return ",".join(str(r.name).lower() for r in reasons)
    status: Any = getattr(result, "m_status", None)
    if status is None and hasattr(result, "get_status"):
        status = result.get_status()
    return None if status is None else str(status.name).lower()


def is_running(handle: Any) -> bool:
    return str(handle.get_status().name) == "RUNNING"


@dataclass(frozen=True, slots=True)
class Prompted:
    """One prompt as it was handed in: its text where it is one, the number of its ids where it is ids."""

    text: str | None
    n_tokens: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one prompt. `n_tokens` of it where ids came back; `usage` where the figures are of it alone."""

    given: Prompted
    text: str | None
    n_tokens: int | None
    usage: Usage | None
    ended: str | None


def prompted(inputs: object) -> tuple[Prompted, ...]:
    """The prompts of whatever `generate` and `add_request` take."""
    if isinstance(inputs, str):
        return (Prompted(inputs, None),)
    if isinstance(inputs, list | tuple):
        return tuple(p for one in inputs for p in prompted(one))
    shape = getattr(getattr(inputs, "input_ids", inputs), "shape", None)
    if shape is not None and len(shape) == 2:
        return (Prompted(None, int(shape[1])),) * int(shape[0])
    return (Prompted(None, None),)


def answers(inputs: object, result: object) -> tuple[Answer, ...]:
    """The prompts of one call of `generate`, each with what came of it.

    The figures of a call with several prompts are of all together, or of the longest: they are then nobody's.
    """
    given = prompted(inputs)
    results = result if isinstance(result, list) else [result]
    said = [one for each in results for one in _said(each)]
    if len(given) == 1:
        return (Answer(given[0], *said[0], usage_of(results[0]), ended_as(results[0])),)
    ends = [ended_as(one) for one in results] if len(results) == len(given) else _reasons(results[0], len(given))
    said += [(None, None)] * (len(given) - len(said))
    return tuple(Answer(g, *s, None, e) for g, s, e in zip(given, said, ends, strict=False))


def _said(result: object) -> list[tuple[str | None, int | None]]:
    """Text and number of ids of each answer in one result."""
    if isinstance(result, str):
        return [(result, None)]
    for name in ("texts", "tokens", "m_generation_ids"):
        found = getattr(result, name, None)
        if found:
            return [(one, None) if isinstance(one, str) else (None, len(one)) for one in found]
    return [(None, None)]


def _reasons(result: object, n: int) -> list[str | None]:
    reasons = getattr(result, "finish_reasons", None) or ()
    return [str(r.name).lower() for r in reasons] if len(reasons) == n else [None] * n


def tokens_in(pipeline: Any, messages: Sequence[dict[str, str]] | None, text: str) -> int:
    """Our own count of a text's tokens, for want of the engine's: of `messages` through the chat template."""
    tokenizer = pipeline.get_tokenizer()
    if messages is None:
        return int(tokenizer.encode(text, add_special_tokens=False).input_ids.shape[1])
    whole = tokenizer.apply_chat_template(list(messages), True)
    return int(tokenizer.encode(whole, add_special_tokens=False).input_ids.shape[1])


@dataclass(frozen=True, slots=True)
class Cache:
    """How full the cache of a pipeline is, percent, and how large, bytes; of all its requests together."""

    usage_percent: float
    size_bytes: int


def cache_of(pipeline: Any) -> Cache | None:
    """None for a pipeline that does not say."""
    ask = getattr(pipeline, "get_metrics", None)
    if ask is None:
        return None
    metrics = ask()
    return Cache(float(metrics.cache_usage), int(metrics.cache_size_in_bytes))


def scheduler_facts(scheduler: Any) -> dict[str, Any]:
    """A `SchedulerConfig` as plain facts: native eviction and prefix caching among them."""
    names = ("cache_size", "dynamic_split_fuse", "enable_prefix_caching", "max_num_batched_tokens", "max_num_seqs")
    told: dict[str, Any] = {name: getattr(scheduler, name) for name in (*names, "num_kv_blocks")}
    told["sparse_attention"] = bool(scheduler.use_sparse_attention)
    told["eviction"] = _eviction(scheduler.cache_eviction_config) if scheduler.use_cache_eviction else None
    return told


def _eviction(config: Any) -> dict[str, Any]:
    return {
        "start": int(config.get_start_size()),
        "recent": int(config.get_recent_size()),
        "most": int(config.get_max_cache_size()),
        "aggregation": str(config.aggregation_mode.name).lower(),
        "rotation": bool(config.apply_rotation),
        "window": int(config.snapkv_window_size),
    }
