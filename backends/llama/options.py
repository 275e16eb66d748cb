"""Checks before a context exists: options, sizes, KV types, memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtape.backends.asked import CONTEXT_PADDING, check_sizes, effective_n_ctx, read_options
from kvtape.backends.errors import UsageError
from kvtape.backends.llama.context import GGML_TYPES, ContextParams
from kvtape.backends.protocol import SessionConfig
from kvtape.capacity.model import ModelShape
from kvtape.planner.specs import Option

__all__ = ["LlamaOptions", "context_params", "parse_llama_options", "storage_bytes"]

_OPTIONS: Final = {
    "n_ubatch": Option(int, 128, (1, 2**16)),
    "scores": Option(str, "off", ("on", "off")),
    "swa_full": Option(bool, False),
}
_WIDTHS: Final = {"bf16": 2, "f16": 2, "f32": 4}


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """`n_ubatch`: tokens per graph, at most the chunk. `swa_full`: keep every row of windowed layers.

    `scores`: read the attention of every query while computing.
    """

    n_ubatch: int
    scores: bool
    swa_full: bool


def parse_llama_options(options: Mapping[str, str]) -> LlamaOptions:
    """Read `SessionConfig.options`. Raises UsageError that names the known keys or the allowed values."""
    given = read_options("llama", options, _OPTIONS)
    return LlamaOptions(given["n_ubatch"], given["scores"] == "on", given["swa_full"])


def context_params(config: SessionConfig, options: LlamaOptions, shape: ModelShape) -> ContextParams:
    """The native parameters. Raises UsageError for a size, a KV type or a memory need that cannot work.

    The context has one padding unit beyond n_ctx: a block that is admitted counts towards n_ctx while it still is in
    the scratch sequence, and exports and refills share the live cells, so only a flush needs room for its one token.
    """
    check_sizes(config)
    for name, kv_type in (("kv_type_k", config.kv_type_k), ("kv_type_v", config.kv_type_v)):
        if kv_type not in GGML_TYPES:
            raise UsageError(f"{name} {kv_type}: this backend opens {', '.join(sorted(GGML_TYPES))}")
    if options.scores and config.flash_attention:
        raise UsageError("flash attention never has the attention weights in memory: scores=on needs it off")
    # The engine aborts the process when a batch has less room than there are sequences.
    n_batch = max(2, config.chunk)
    params = ContextParams(
        n_ctx=effective_n_ctx(config.n_ctx) + CONTEXT_PADDING,
        n_batch=n_batch,
        n_ubatch=min(n_batch, options.n_ubatch),
        type_k=config.kv_type_k,
        type_v=config.kv_type_v,
        flash_attention=config.flash_attention,
        threads=config.threads,
        swa_full=options.swa_full,
    )
    _check_memory(params, shape, scores=options.scores)
    return params


def storage_bytes(shape: ModelShape, type_k: str, type_v: str) -> int:
    """Bytes of one token's rows over all layers."""
    return shape.kv_bytes_per_token(_WIDTHS[type_k], _WIDTHS[type_v])


def _check_memory(params: ContextParams, shape: ModelShape, *, scores: bool) -> None:
    """The kernel overcommits, so an absurd size must be refused before the engine asks for it."""
    cache = params.n_ctx * storage_bytes(shape, params.type_k, params.type_v)
    attention = 0 if params.flash_attention else params.n_ctx * params.n_ubatch * max(1, shape.n_head) * 4
    if scores:
        # Sums by head, float64: of the running operation, of the cells, of the rows by tape position.
        attention += 3 * params.n_ctx * shape.n_layer * max(1, shape.n_head) * 8
    free = _available_bytes()
    if cache + attention > free:
        need = f"{cache / 2**30:.1f} GiB of cache and {attention / 2**30:.1f} GiB of attention scores"
        raise UsageError(f"n_ctx {params.n_ctx} needs {need}, {free / 2**30:.1f} GiB are free; ask for a smaller n_ctx")


def _available_bytes() -> int:
    """Memory that can be had without swapping: MemAvailable where the kernel says it, else free pages."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
