"""A tiny gemma4: KV heads layer by layer, heads of two sizes, an array of windows, and layers that share KV."""

from __future__ import annotations

from pathlib import Path

import gguf

from support.tiny_latent import write_drawn, write_small_vocabulary

__all__ = ["write_tiny_gemma4"]

_EMBD, _FEED, _HEADS = 256, 128, 4
_FULL, _WINDOWED = 64, 32
"""Elements of a head."""


def write_tiny_gemma4(path: Path, *, shared: int, n_layer: int = 6, window: int = 64) -> Path:
    """Every third layer is full, with 1 KV head; the others are windowed, with 4. The last `shared` share."""
    flags = [i % 3 < 2 for i in range(n_layer)]
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_context_length(4096)
    writer.add_embedding_length(_EMBD)
    writer.add_block_count(n_layer)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_feed_forward_length(_FEED)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv([_kv_heads(flag) for flag in flags])
    writer.add_key_length(_FULL)
    writer.add_value_length(_FULL)
    writer.add_sliding_window(window)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(_FULL)
    writer.add_array("gemma4.attention.sliding_window_pattern", flags)
    for key, value in {
        "attention.key_length_swa": _WINDOWED,
        "attention.value_length_swa": _WINDOWED,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": 0,
        "rope.dimension_count_swa": _WINDOWED,
    }.items():
        writer.add_uint32(f"gemma4.{key}", value)
    writer.add_float32("gemma4.rope.freq_base_swa", 10000.0)
    n_vocab = write_small_vocabulary(writer)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (n_vocab, _EMBD),
        "output_norm": (_EMBD,),
        "rope_freqs": (_FULL // 2,),
    }
    for i, flag in enumerate(flags):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in _block(flag).items()}
    write_drawn(writer, shapes)
    return path


def _kv_heads(windowed: bool) -> int:
    return 4 if windowed else 1


def _block(windowed: bool) -> dict[str, tuple[int, ...]]:
    head, kv_heads = _WINDOWED if windowed else _FULL, _kv_heads(windowed)
    return {
        "attn_norm": (_EMBD,),
        "attn_q": (_HEADS * head, _EMBD),
        "attn_k": (kv_heads * head, _EMBD),
        "attn_v": (kv_heads * head, _EMBD),
        "attn_output": (_EMBD, _HEADS * head),
        "attn_q_norm": (head,),
        "attn_k_norm": (head,),
        "post_attention_norm": (_EMBD,),
        "ffn_norm": (_EMBD,),
        "ffn_gate": (_FEED, _EMBD),
        "ffn_up": (_FEED, _EMBD),
        "ffn_down": (_EMBD, _FEED),
        "post_ffw_norm": (_EMBD,),
    }
