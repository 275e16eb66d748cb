"""GGUF keys of public models, as far as a cache depends on them.

Keys that were recalled rather than read from a file are used only where a printed size of `kv-sizes.tsv` confirms them.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KNOWN_MODELS", "keys_of"]


def _attention(layers: int, heads: int, kv_heads: Any, width: int | None, **more: Any) -> dict[str, Any]:
    keys = {"block_count": layers, "attention.head_count": heads, "attention.head_count_kv": kv_heads, **more}
    if width is not None:
        keys |= {"attention.key_length": width, "attention.value_length": width}
    return keys


def _gemma4(layers: int, period: int, kv_full: int, kv_windowed: int, window: int, shared: int = 0) -> dict[str, Any]:
    flags = [i % period < period - 1 for i in range(layers)]
    return _attention(
        layers,
        16,
        [kv_windowed if flag else kv_full for flag in flags],
        512,
        **{
            "attention.key_length_swa": 256,
            "attention.value_length_swa": 256,
            "attention.sliding_window": window,
            "attention.sliding_window_pattern": flags,
            "attention.shared_kv_layers": shared,
        },
    )


def _delta(layers: int, inner: int, kv_heads: int = 4) -> dict[str, Any]:
    return _attention(
        layers,
        16,
        kv_heads,
        256,
        **{
            "embedding_length": 4096,
            "full_attention_interval": 4,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": inner,
            "ssm.state_size": 128,
            "ssm.group_count": 16,
        },
    )


_WINDOW = "attention.sliding_window"
_ABSORBED = {"attention.key_length_mla": 192, "attention.value_length_mla": 128, "attention.kv_lora_rank": 512}
_LATENT = {"attention.key_length": 576, "attention.value_length": 512, **_ABSORBED}

KNOWN_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "27-layer deepseek2, not absorbed": (
        "deepseek2",
        _attention(27, 16, 16, 192, **{"attention.value_length": 128, "attention.kv_lora_rank": 512})
        | {"attention.value_length": 128},
    ),
    "DeepSeek-V3/R1 MLA (fork)": ("deepseek2", _attention(61, 128, 1, None, **_LATENT)),
    "GLM-5 class, DSA": (
        "glm-dsa",
        _attention(
            78,
            64,
            1,
            None,
            **_LATENT,
            **{"attention.indexer.key_length": 128, "attention.indexer.types": [0] * 21 + [1] * 57},
        ),
    ),
    "Laguna (1M ctx)": ("laguna", _attention(48, 64, 8, 128, **{_WINDOW: 512})),
    "Llama-2-70B class": ("llama", _attention(80, 64, 8, None, embedding_length=8192)),
    "Llama-2-7B": ("llama", _attention(32, 32, 32, None, embedding_length=4096)),
    "Llama-3.1-8B": ("llama", _attention(32, 32, 8, None, embedding_length=4096, context_length=131072)),
    "Llama-3.x-70B": ("llama", _attention(80, 64, 8, None, embedding_length=8192)),
    "Qwen2.5-Coder-1.5B": ("qwen2", _attention(28, 12, 2, None, embedding_length=1536, context_length=32768)),
    "Qwen3-30B-A3B": ("qwen3moe", _attention(48, 32, 4, 128, embedding_length=2048)),
    "Qwen3-4B or 8B": ("qwen3", _attention(36, 32, 8, 128, embedding_length=2560)),
    "Qwen3-Coder-30B-A3B": ("qwen3moe", _attention(48, 32, 4, 128, embedding_length=2048)),
    "Qwen3.5-9B": ("qwen35", _delta(32, 4096)),
    "Qwen3.6-27B": ("qwen35", _delta(64, 6144)),
    "Qwen3.6-35B-A3B": ("qwen35", _delta(40, 4096)),
    "Qwen3.8-27B": ("qwen35", _delta(64, 6144)),
    "Qwen3.8-Flash-Next": ("qwen4exp", _delta(48, 4096, 2) | {"attention.indexer.key_length": 128}),
    "gemma-2-2b": ("gemma2", _attention(26, 8, 4, 256)),
    "gemma-3-270m": ("gemma3", _attention(18, 4, 1, 256, **{_WINDOW: 512, "context_length": 32768})),
    "gemma-3-27b": ("gemma3", _attention(62, 32, 16, 128, **{_WINDOW: 1024})),
    "gemma-4-12b": ("gemma4", _gemma4(48, 6, 1, 8, 1024)),
    "gemma-4-26b-a4b": ("gemma4", _gemma4(30, 6, 2, 8, 1024)),
    "gemma-4-31b": ("gemma4", _gemma4(60, 6, 4, 16, 1024)),
    "gemma-4-E2B": ("gemma4", _gemma4(35, 5, 1, 1, 512, 20)),
    "gemma-4-E4B": ("gemma4", _gemma4(42, 6, 2, 2, 512, 18)),
    "gpt-oss-120b": ("gpt-oss", _attention(36, 64, 8, 64, **{_WINDOW: 128})),
    "gpt-oss-20b": ("gpt-oss", _attention(24, 64, 8, 64, **{_WINDOW: 128, "context_length": 131072})),
}
"""Model name -> architecture and keys without its prefix."""


def keys_of(name: str, **changed: Any) -> dict[str, Any]:
    """The flat map of GGUF keys of a known model; `changed` replaces some (None removes)."""
    arch, keys = KNOWN_MODELS[name]
    merged = {**keys, **changed}
    return {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in merged.items() if v is not None}
