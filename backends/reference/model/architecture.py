"""What the forward of a model depends on beside its tensors: per layer windows and rotation, scales, caps.

Everything is read from the file's metadata; what an architecture fixes by itself follows llama.cpp's loaders (MIT,
August 2026). A model that needs more than is known here is refused by name, never run half right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from kvtape.backends.reference.errors import ModelUnsupported
from kvtape.backends.reference.model.rope import Rotary, YarnScaling, plain_frequencies, yarn_frequencies
from kvtape.capacity.metadata import Metadata
from kvtape.capacity.model import ModelShape
from kvtape.capacity.patterns import windows_of

__all__ = ["KNOWN_ARCHS", "Activation", "Architecture", "read_architecture"]

Activation = Literal["silu", "gelu"]

KNOWN_ARCHS: Final = ("gemma2", "gemma3", "llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe")
_WITH_EXPERTS: Final = ("llama", "qwen2moe", "qwen3moe")
_SOFTMAX: Final = 1
_GEMMA: Final = ("gemma2", "gemma3")

# The largest model of each family scales its queries by n_embd / n_head instead of the head size.
_GEMMA_27B_LAYERS: Final = {"gemma2": 46, "gemma3": 62}
_WINDOWED_ROPE_BASE: Final = 10000.0

_REFUSED_KEYS: Final = {
    "attention.clamp_kqv": "clamped projections",
    "attention.kv_lora_rank": "latent attention (MLA)",
    "attention.key_length_swa": "other head sizes in windowed layers",
    "attention.scale": "an attention scale of its own",
    "attention.shared_kv_layers": "layers that share the KV of others",
    "embedding_scale": "an embedding scale of its own",
    "expert_group_count": "experts in groups",
    "expert_weights_scale": "a scale of its own for experts",
    "logit_scale": "a logit scale of its own",
    "residual_scale": "a residual scale",
    "rope.dimension_sections": "rotation by sections (M-RoPE)",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes count components, heads, layers. `windows`: of each layer, in tokens, 0 for full attention.

    `rotaries`: of each layer. `query_scale` multiplies queries before the dot product. `attention_cap`, `logit_cap`:
    soft caps `c * tanh(x / c)`, 0 for none. `history`: by name, what makes keys and values of a row depend on more than
    its residual row and its position (a stateful norm, learned positions, latent attention). None of `KNOWN_ARCHS` has
    such a thing; an architecture that is added says so here, and engines that keep residual rows refuse it.
    `n_expert_used`: experts that a row goes through, 0 without experts; `normalised_shares`, `shared_expert`: see
    `feed_forward`.
    """

    shape: ModelShape
    windows: tuple[int, ...]
    rotaries: tuple[Rotary, ...]
    query_scale: float
    embed_scale: float = 1.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    activation: Activation = "silu"
    n_expert_used: int = 0
    normalised_shares: bool = False
    shared_expert: bool = False
    history: tuple[str, ...] = ()

    @property
    def n_layer(self) -> int:
        return self.shape.n_layer


def read_architecture(shape: ModelShape, meta: Metadata, rope_factors: npt.NDArray[np.float32] | None) -> Architecture:
    """`rope_factors`: the tensor `rope_freqs.weight`, where the file has one. Raises ModelUnsupported."""
    obstacle = _obstacle(shape, meta)
    if obstacle:
        raise ModelUnsupported(f"{shape.path}: {obstacle}")
    windows = windows_of(meta, shape.n_layer)
    per_layer = tuple(windows.window if windowed else 0 for windowed in windows.flags)
    full, windowed = _rotaries(shape, meta, rope_factors)
    gemma = shape.arch in _GEMMA
    return Architecture(
        shape=shape,
        windows=per_layer,
        rotaries=tuple(windowed if window else full for window in per_layer),
        query_scale=_query_scale(shape),
        embed_scale=math.sqrt(shape.n_embd) if gemma else 1.0,
        attention_cap=_number(meta, "attn_logit_softcapping", 50.0 if shape.arch == "gemma2" else 0.0),
        logit_cap=_number(meta, "final_logit_softcapping", 30.0 if shape.arch == "gemma2" else 0.0),
        activation="gelu" if gemma else "silu",
        n_expert_used=meta.integer("expert_used_count", 0) if meta.integer("expert_count", 0) else 0,
        normalised_shares=shape.arch != "qwen2moe",
        shared_expert=shape.arch == "qwen2moe",
    )


def _obstacle(shape: ModelShape, meta: Metadata) -> str | None:
    if shape.arch not in KNOWN_ARCHS:
        return f"architecture {shape.arch}; the reference knows {', '.join(KNOWN_ARCHS)}"
    if shape.rope_scaling not in ("none", "linear", "yarn"):
        return f"RoPE scaling {shape.rope_scaling!r}; the reference knows none, linear, yarn"
    refused = [why for key, why in _REFUSED_KEYS.items() if meta.get(key)]
    if refused:
        return f"{' and '.join(refused)}; the reference does not know it"
    n_expert, n_used = meta.integer("expert_count", 0), meta.integer("expert_used_count", 0)
    if n_expert and not 0 < n_used <= n_expert:
        return f"{n_used} of {n_expert} experts used"
    if n_expert and shape.arch not in _WITH_EXPERTS:
        return f"experts in {shape.arch}; the reference knows those of {', '.join(_WITH_EXPERTS)}"
    if meta.integer("expert_gating_func", _SOFTMAX) != _SOFTMAX:
        return "experts chosen by another rule than softmax; the reference does not know it"
    for key in ("attention.head_count", "attention.head_count_kv"):
        if isinstance(meta.get(key), list) and len(set(meta.get(key))) > 1:
            return f"head counts that differ between layers ({meta.arch}.{key}); the reference knows one for all"
    if windows_of(meta, shape.n_layer).chunked:
        return "chunked attention; the reference knows full and windowed"
    return None


def _rotaries(shape: ModelShape, meta: Metadata, factors: npt.NDArray[np.float32] | None) -> tuple[Rotary, Rotary]:
    """Of full and of windowed layers. Gemma 3 turns its windowed layers by a base of their own, unscaled."""
    full = _scaled(shape, meta, factors)
    if shape.arch != "gemma3":
        return full, full
    base = _number(meta, "rope.freq_base_swa", _WINDOWED_ROPE_BASE)
    return full, Rotary(plain_frequencies(base, shape.rope_dims), shape.rope_pairs)


def _scaled(shape: ModelShape, meta: Metadata, factors: npt.NDArray[np.float32] | None) -> Rotary:
    if shape.rope_frequencies:
        return Rotary(np.asarray(shape.rope_frequencies, np.float64), shape.rope_pairs)
    plain = plain_frequencies(shape.rope_base, shape.rope_dims, factors)
    attention = _number(meta, "rope.scaling.attn_factor", 1.0)
    factor = _number(meta, "rope.scaling.factor", _number(meta, "rope.scale_linear", 1.0)) or 1.0
    if shape.rope_scaling == "yarn":
        yarn = YarnScaling(
            factor=factor,
            original=meta.integer("rope.scaling.original_context_length", shape.n_ctx_train),
            attention=attention,
            beta_fast=_number(meta, "rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=_number(meta, "rope.scaling.yarn_beta_slow", 1.0),
        )
        frequencies, magnitude = yarn_frequencies(plain, shape.rope_base, shape.rope_dims, yarn)
        return Rotary(frequencies, shape.rope_pairs, magnitude)
    scale = factor if shape.rope_scaling == "linear" or not meta.has("rope.scaling.type") else 1.0
    return Rotary(plain / scale, shape.rope_pairs, attention)


def _query_scale(shape: ModelShape) -> float:
    if _GEMMA_27B_LAYERS.get(shape.arch) == shape.n_layer:
        return float((shape.n_embd / shape.n_head) ** -0.5)
    return float(shape.head_dim_k**-0.5)


def _number(meta: Metadata, key: str, default: float) -> float:
    value: Any = meta.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelUnsupported(f"{meta.source}: {meta.arch}.{key} is {value!r}; a number is needed")
    return float(value)
