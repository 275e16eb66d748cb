"""Tiny models with multi-head latent attention (deepseek2), as newer and as older converters write them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from support.tiny_gguf import byte_bpe_vocabulary

__all__ = ["write_drawn", "write_small_vocabulary", "write_tiny_latent"]

_EMBD, _FEED, _QUERY_RANK, _HEADS = 64, 128, 32, 4


def write_tiny_latent(
    path: Path, *, absorbed: bool, rank: int = 64, rope: int = 32, plain: int = 32, value: int = 32, n_layer: int = 2
) -> Path:
    """`rank`: of the latent; `rope` and `plain`: rotated and other components of a key; `value`: of a value.

    `absorbed` files keep one latent row a token (rank + rope elements), others the keys and values of every head.
    """
    writer = gguf.GGUFWriter(path, "deepseek2")
    _write_keys(writer, n_layer, rank, rope)
    if absorbed:
        writer.add_head_count_kv(1)
        writer.add_key_length(rank + rope)
        writer.add_value_length(rank)
        writer.add_key_length_mla(plain + rope)
        writer.add_value_length_mla(value)
    else:
        writer.add_head_count_kv(_HEADS)
        writer.add_key_length(plain + rope)
        writer.add_value_length(value)
    n_vocab = write_small_vocabulary(writer)
    write_drawn(writer, _shapes(n_vocab, n_layer, rank, rope, plain, value, absorbed=absorbed))
    return path


def write_small_vocabulary(writer: gguf.GGUFWriter) -> int:
    """The byte vocabulary with ten merges; the number of its tokens."""
    tokens, types, merges = byte_bpe_vocabulary(10)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    return len(tokens)


def write_drawn(writer: gguf.GGUFWriter, shapes: dict[str, tuple[int, ...]]) -> None:
    """Draw a tensor of each shape (ones for vectors), write the file and close it."""
    for name, shape in shapes.items():
        writer.add_tensor(name + ".weight", _draw(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_keys(writer: gguf.GGUFWriter, n_layer: int, rank: int, rope: int) -> None:
    writer.add_context_length(4096)
    writer.add_embedding_length(_EMBD)
    writer.add_block_count(n_layer)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_feed_forward_length(_FEED)
    writer.add_head_count(_HEADS)
    writer.add_leading_dense_block_count(n_layer)
    writer.add_kv_lora_rank(rank)
    writer.add_q_lora_rank(_QUERY_RANK)
    writer.add_rope_dimension_count(rope)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(0)
    writer.add_expert_used_count(0)
    writer.add_expert_feed_forward_length(_FEED)
    writer.add_expert_shared_count(1)


def _shapes(
    n_vocab: int, n_layer: int, rank: int, rope: int, plain: int, value: int, *, absorbed: bool
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (n_vocab, _EMBD),
        "output_norm": (_EMBD,),
        "output": (n_vocab, _EMBD),
    }
    for layer in range(n_layer):
        block = {
            "attn_norm": (_EMBD,),
            "attn_q_a": (_QUERY_RANK, _EMBD),
            "attn_q_a_norm": (_QUERY_RANK,),
            "attn_q_b": (_HEADS * (plain + rope), _QUERY_RANK),
            "attn_kv_a_mqa": (rank + rope, _EMBD),
            "attn_kv_a_norm": (rank,),
            "attn_output": (_EMBD, _HEADS * value),
            "ffn_norm": (_EMBD,),
            "ffn_gate": (_FEED, _EMBD),
            "ffn_up": (_FEED, _EMBD),
            "ffn_down": (_EMBD, _FEED),
        }
        if absorbed:
            block |= {"attn_k_b": (_HEADS, rank, plain), "attn_v_b": (_HEADS, value, rank)}
        else:
            block |= {"attn_kv_b": (_HEADS * (plain + value), rank)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def _draw(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    drawn = np.random.default_rng(0).standard_normal(shape) / np.sqrt(shape[-1])
    return np.asarray(drawn, np.float32)
