"""Checks before a context exists: options, sizes, KV types, memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtape.backends.errors import UsageError
from kvtape.backends.llama.context import GGML_TYPES, ContextParams
from kvtape.backends.protocol import SessionConfig
from kvtape.capacity.model import ModelShape

__all__ = ["CONTEXT_PADDING", "LlamaOptions", "context_params", "effective_n_ctx", "parse_options", "storage_bytes"]

CONTEXT_PADDING: Final = 256
"""llama.cpp rounds a context up to a multiple of this many tokens."""

_DEFAULT_UBATCH: Final = 128
_N_CTX_MAX: Final = 2**24
_CHUNK_MAX: Final = 2**16
_THREADS_MAX: Final = 512
_WIDTHS: Final = {"bf16": 2, "f16": 2, "f32": 4}


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """`n_ubatch`: tokens per graph, at most the chunk. `swa_full`: keep every row of windowed layers."""

    n_ubatch: int = _DEFAULT_UBATCH
    swa_full: bool = False


def parse_options(options: Mapping[str, str]) -> LlamaOptions:
    """Read `SessionConfig.options`. Raises UsageError that names the known keys or the allowed values."""
    unknown = sorted(set(options) - {"n_ubatch", "swa_full"})
    if unknown:
        raise UsageError(f"llama has no option {unknown[0]!r}; known: n_ubatch, swa_full")
    n_ubatch = options.get("n_ubatch", str(_DEFAULT_UBATCH))
    swa_full = options.get("swa_full", "no")
    if not n_ubatch.isascii() or not n_ubatch.isdecimal() or not 1 <= int(n_ubatch) <= _CHUNK_MAX:
        raise UsageError(f"llama option n_ubatch={n_ubatch}: a number of tokens in [1, {_CHUNK_MAX}]")
    if swa_full not in ("yes", "no"):
        raise UsageError(f"llama option swa_full={swa_full}: yes or no")
    return LlamaOptions(int(n_ubatch), swa_full == "yes")


def effective_n_ctx(asked: int) -> int:
    """The context in tokens: `asked` made even, then rounded up as the engine does."""
    if not 1 <= asked <= _N_CTX_MAX:
        raise UsageError(f"n_ctx {asked}: must be in [1, {_N_CTX_MAX}] tokens")
    even = asked + asked % 2
    return -(-even // CONTEXT_PADDING) * CONTEXT_PADDING


def context_params(config: SessionConfig, options: LlamaOptions, shape: ModelShape) -> ContextParams:
    """The native parameters. Raises UsageError for a size, a KV type or a memory need that cannot work.

    The context has one padding unit beyond n_ctx: a block that is admitted counts towards n_ctx while it still is in
    the scratch sequence, and exports and refills share the live cells, so only a flush needs room for its one token.
    """
    for name, value, top in (("chunk", config.chunk, _CHUNK_MAX), ("threads", config.threads, _THREADS_MAX)):
        if not 1 <= value <= top:
            raise UsageError(f"{name} {value}: must be in [1, {top}]")
    if config.cold_budget_tokens < 0:
        raise UsageError(f"cold_budget_tokens {config.cold_budget_tokens}: must not be negative")
    for name, kv_type in (("kv_type_k", config.kv_type_k), ("kv_type_v", config.kv_type_v)):
        if kv_type not in GGML_TYPES:
            raise UsageError(f"{name} {kv_type}: this backend opens {', '.join(sorted(GGML_TYPES))}")
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
    _check_memory(params, shape)
    return params


def storage_bytes(shape: ModelShape, type_k: str, type_v: str) -> int:
    """Bytes of one token's rows over all layers."""
    return shape.kv_bytes_per_token(_WIDTHS[type_k], _WIDTHS[type_v])


def _check_memory(params: ContextParams, shape: ModelShape) -> None:
    """The kernel overcommits, so an absurd size must be refused before the engine asks for it."""
    cache = params.n_ctx * storage_bytes(shape, params.type_k, params.type_v)
    scores = 0 if params.flash_attention else params.n_ctx * params.n_ubatch * max(1, shape.n_head) * 4
    free = _available_bytes()
    if cache + scores > free:
        need = f"{cache / 2**30:.1f} GiB of cache and {scores / 2**30:.1f} GiB of attention scores"
        raise UsageError(f"n_ctx {params.n_ctx} needs {need}, {free / 2**30:.1f} GiB are free; ask for a smaller n_ctx")


def _available_bytes() -> int:
    """Memory that can be had without swapping: MemAvailable where the kernel says it, else free pages."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
