"""The caches that llama.cpp says it allocated, read from its own log lines."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvtape.backends.llama.kv_types import GGML_TYPES
from kvtape.backends.llama.native import NativeModel, engine_log, library
from kvtape.capacity.allocation import CacheSettings

__all__ = ["LoggedCache", "logged_caches"]

_KV = re.compile(
    r"llama_kv_cache: size = +[\d.]+ MiB \( *(\d+) cells, +(\d+) layers, +\d+/(\d+) seqs\), "
    r"K \((\w+)\): +([\d.]+) MiB, V \((\w+)\): +([\d.]+) MiB"
)
_STATES = re.compile(
    r"llama_memory_recurrent: size = +[\d.]+ MiB \( *(\d+) cells,.* (\d+) rs_seq\), "
    r"R \(f32\): +([\d.]+) MiB, S \(f32\): +([\d.]+) MiB"
)


class LoggedCache(NamedTuple):
    """Sizes as printed, MiB with two decimals. `layers` is None for states: the engine prints all layers there."""

    layers: int | None
    cells: int
    streams: int
    k_mib: str
    v_mib: str


def logged_caches(model: NativeModel, n_ctx: int, settings: CacheSettings, k: str, v: str) -> list[LoggedCache]:
    """Open a context, read what was logged, free it. Caches without a layer are left out."""
    lib = library()
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.kv_unified = n_ctx, settings.slots, settings.unified
    params.n_batch, params.n_ubatch, params.swa_full = settings.n_batch, settings.n_ubatch, settings.swa_full
    params.flash_attn_type = 1 if settings.flash_attention else 0
    params.type_k, params.type_v = GGML_TYPES[k], GGML_TYPES[v]
    params.n_threads = params.n_threads_batch = 1
    mark = engine_log.mark()
    context = lib.llama_init_from_model(model.pointer, params)
    assert context, engine_log.quote(mark)
    text = "\n".join(engine_log.since(mark, errors_only=False))
    lib.llama_free(context)
    kv = [LoggedCache(int(m[2]), int(m[1]), int(m[3]), m[5], m[7]) for m in _KV.finditer(text)]
    states = [LoggedCache(None, int(m[1]) * (1 + int(m[2])), 1, m[3], m[4]) for m in _STATES.finditer(text)]
    return [cache for cache in kv if cache.layers] + states
