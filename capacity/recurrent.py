"""Recurrent layers: which they are, and the size of their states. llama.cpp's rules (MIT, August 2026).

A state has two parts, both f32 and one a sequence: R, the last inputs of a convolution, and S, the state proper.
"""

from __future__ import annotations

from typing import Final

from kvtape.capacity.errors import ModelFileError
from kvtape.capacity.metadata import Metadata

__all__ = ["RECURRENT_ONLY", "recurrent_layers", "state_elements"]

RECURRENT_ONLY: Final = frozenset({"arwkv7", "mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7"})
"""No attention at all."""

_BOTH: Final = frozenset({"falcon-h1"})
"""Every layer has attention and a state."""

_BY_INTERVAL: Final = frozenset({"qwen35", "qwen35moe", "qwen3next", "qwen4exp"})
_BY_HEADS: Final = frozenset({"granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "plamo2"})
_BY_HEADS_AND_FEED_FORWARD: Final = frozenset({"nemotron_h", "nemotron_h_moe"})
_DEFAULT_INTERVAL: Final = 4


def recurrent_layers(
    meta: Metadata, kv_heads: tuple[int, ...]
) -> tuple[tuple[bool, ...], tuple[bool, ...], tuple[str, ...]]:
    """Which layers have a state, which have attention, and what was assumed. Raises ModelFileError."""
    n, arch = len(kv_heads), meta.arch
    if arch in RECURRENT_ONLY:
        return (True,) * n, (False,) * n, ()
    if arch in _BOTH:
        return (True,) * n, (True,) * n, ()
    declared = meta.get("attention.recurrent_layers")
    if isinstance(declared, list | tuple):
        flags = tuple(bool(f) for f in meta.per_layer("attention.recurrent_layers", len(declared))[:n])
        if len(flags) < n:
            raise ModelFileError(f"{meta.source}: {arch}.attention.recurrent_layers has {len(declared)} of {n} entries")
        return flags, tuple(not f for f in flags), ()
    if arch in _BY_INTERVAL or meta.has("full_attention_interval"):
        interval = meta.integer("full_attention_interval", _DEFAULT_INTERVAL)
        if interval < 1:
            raise ModelFileError(f"{meta.source}: {arch}.full_attention_interval is {interval}; 1 is the least")
        flags = tuple((i + 1) % interval != 0 for i in range(n))
        why = () if arch in _BY_INTERVAL else (f"assumed: {arch} is unknown; one layer in {interval} has attention",)
        return flags, tuple(not f for f in flags), why
    attention = tuple(heads > 0 for heads in kv_heads)
    if arch in _BY_HEADS:
        return tuple(not a for a in attention), attention, ()
    if arch in _BY_HEADS_AND_FEED_FORWARD:
        feeds = meta.per_layer("feed_forward_length", n, 0)
        return tuple(not a and not f for a, f in zip(attention, feeds, strict=True)), attention, ()
    if _has_state(meta):
        why = (f"assumed: {arch} is unknown and has state keys; layers without KV heads are taken for recurrent",)
        return tuple(not a for a in attention), attention, why
    return (False,) * n, attention, ()


def state_elements(meta: Metadata) -> tuple[int, int]:
    """Elements of R and of S of one layer. Raises ModelFileError for a missing key."""
    n_embd = meta.integer("embedding_length")
    wkv = meta.integer("wkv.head_size", 0)
    if wkv:
        return meta.integer("token_shift_count", 2) * n_embd, n_embd * wkv
    short_cache = meta.integer("shortconv.l_cache", 0)
    if short_cache:
        return n_embd * (short_cache - 1), 0
    kernel = meta.integer("ssm.conv_kernel", 0)
    head = meta.integer("kda.head_dim", 0)
    if head:
        n_head = max(meta.per_layer("attention.head_count", meta.integer("block_count")))
        return 3 * max(0, kernel - 1 if kernel else 3) * n_head * head, head * head * n_head
    inner, state = meta.integer("ssm.inner_size"), meta.integer("ssm.state_size")
    groups = meta.integer("ssm.group_count", 0)
    return max(0, kernel - 1) * (inner + 2 * groups * state), state * inner


def _has_state(meta: Metadata) -> bool:
    return any(meta.has(key) for key in ("ssm.state_size", "shortconv.l_cache", "wkv.head_size", "kda.head_dim"))
