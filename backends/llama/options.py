"""Checks before a context exists: options, sizes, KV types, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvtape.backends.asked import CONTEXT_PADDING, check_sizes, read_options
from kvtape.backends.errors import UsageError
from kvtape.backends.fit import MEMORY_OPTION, fitted_context, read_memory
from kvtape.backends.llama.context import ContextParams
from kvtape.backends.llama.kv_types import check_kv_types
from kvtape.backends.llama.sizes import session_need
from kvtape.backends.protocol import SessionConfig
from kvtape.capacity.model import ModelShape
from kvtape.planner.specs import Option

__all__ = ["LlamaOptions", "context_params", "parse_llama_options"]

_OPTIONS: Final = {
    "memory": MEMORY_OPTION,
    "n_ubatch": Option(int, 128, (1, 2**16)),
    "scores": Option(str, "off", ("on", "off")),
    "shift_quantised": Option(bool, False),
    "swa_full": Option(bool, False),
}


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """`n_ubatch`: tokens per graph, at most the chunk. `swa_full`: keep every row of windowed layers.

    `scores`: read the attention of every query while computing. `shift_quantised`: allow shifts of keys below 8 bits,
    which are rounded again each time. `memory`: bytes that weights and cache must fit in;
    the context is then the largest that does, at most the one asked for.
    """

    n_ubatch: int
    scores: bool
    swa_full: bool
    shift_quantised: bool = False
    memory: int | None = None


def parse_llama_options(options: Mapping[str, str]) -> LlamaOptions:
    """Read `SessionConfig.options`. Raises UsageError that names the known keys or the allowed values."""
    given = read_options("llama", options, _OPTIONS)
    return LlamaOptions(
        n_ubatch=given["n_ubatch"],
        scores=given["scores"] == "on",
        swa_full=given["swa_full"],
        shift_quantised=given["shift_quantised"],
        memory=read_memory(given["memory"]),
    )


def context_params(config: SessionConfig, options: LlamaOptions, shape: ModelShape) -> ContextParams:
    """The native parameters. Raises UsageError for a size or a KV type that cannot work, DoesNotFit for lack of memory.

    The context has one padding unit beyond n_ctx: a block that is admitted counts towards n_ctx while it still is in
    the scratch sequence, and exports and refills share the live cells, so only a flush needs room for its one token.
    """
    check_sizes(config)
    check_kv_types(config, shape)
    if options.scores and config.flash_attention != "off":
        raise UsageError("flash attention never has the attention weights in memory: scores=on needs it off")
    # The engine aborts the process when a batch has less room than there are sequences.
    n_batch = max(2, config.chunk)
    params = ContextParams(
        n_ctx=0,
        n_batch=n_batch,
        n_ubatch=min(n_batch, options.n_ubatch),
        type_k=config.kv_type_k,
        type_v=config.kv_type_v,
        flash_attention=config.flash_attention,
        threads=config.threads,
        swa_full=options.swa_full,
    )
    need = session_need(shape, params, scores=options.scores)
    n_ctx = fitted_context(config.n_ctx, options.memory, need)
    return replace(params, n_ctx=n_ctx + CONTEXT_PADDING)
