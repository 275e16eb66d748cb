"""The shape of a model: what the rest of kvtape asks of a model file, whatever format it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvtape.capacity.geometry import KVGeometry

__all__ = ["ModelShape", "RopePairs"]

RopePairs = Literal["interleaved", "halves"]
"""Which components RoPE rotates together: (0,1),(2,3).. or (i, i + n/2)."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder. Counts are of heads, layers, tokens; `rope_dims` of rotated components a head.

    `fingerprint`: see `capacity.fingerprint`. `tensor_types`: their GGML or OpenVINO names. `tokenizer`: gpt2, llama,
    ...; `end_tokens` end a turn or a text. `geometry`: what its layers keep of a context. `weights_bytes`: of its
    tensors, in all parts of a model in several files. `n_ctx_train` is 0 where the model does not say.
    `rope_frequencies`: radians a position of each rotated pair, where the file has them as numbers; empty where they
    follow from `rope_base`.
    """

    path: str
    fingerprint: str
    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    n_vocab: int
    n_ctx_train: int
    rms_eps: float
    rope_base: float
    rope_dims: int
    rope_pairs: RopePairs
    rope_scaling: str
    sliding_window: int
    qk_norm: bool
    tensor_types: frozenset[str]
    tokenizer: str
    end_tokens: frozenset[int]
    geometry: KVGeometry
    weights_bytes: int
    rope_frequencies: tuple[float, ...] = ()
