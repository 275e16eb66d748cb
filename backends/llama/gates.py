"""What a session on this model with this configuration can do, and why it cannot do the rest.

The engine's own answers are not enough: removing the middle of a recurrent memory returns success and removes
nothing, a shift under YaRN scales every key, one over bf16 keys or M-RoPE positions aborts the process, one over packed
keys crashes it unless the engine spreads them. What passes here is then executed once when the session opens (`proof`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from kvtape.backends.gates import Gates
from kvtape.backends.llama.kv_types import NARROW
from kvtape.backends.llama.native import NativeModel
from kvtape.backends.rounding import PACKED_TYPES
from kvtape.planner.capabilities import Capabilities

__all__ = ["NO_SCORES", "KeyStore", "MemoryFacts", "MemoryKind", "gates_of", "memory_facts", "no_scores_reason"]

MemoryKind = Literal["plain", "windowed", "hybrid", "recurrent"]

_SCALED_ROPE = frozenset({"longrope", "yarn"})
NO_SCORES = "the session was opened without a score source (option scores=on)"
_NO_SPARSE = "llama.cpp has no sparse prefill pattern"


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What decides the gates. `rope_factor` says why keys are scaled beside being rotated; None when they are not.

    `latent`: one latent row a token stands for its keys and values (absorbed multi-head latent attention).
    """

    kind: MemoryKind
    window: int
    multi_rope: bool
    rope_factor: str | None
    latent: bool = False


@dataclass(frozen=True, slots=True)
class KeyStore:
    """How keys are stored. `spread`: multiplied by a Hadamard matrix before they are packed.

    `whole_heads`: RoPE turns every component of a head. `shift_narrow`: shifts below 8 bits were asked for.
    """

    kv_type: str
    spread: bool = False
    whole_heads: bool = True
    shift_narrow: bool = False


def memory_facts(model: NativeModel) -> MemoryFacts:
    """Read them from a loaded model; a recurrent or hybrid memory outranks a window."""
    kind: MemoryKind = "windowed" if model.window else "plain"
    if model.is_recurrent:
        kind = "recurrent"
    elif model.is_hybrid:
        kind = "hybrid"
    return MemoryFacts(kind, model.window, model.has_multi_rope, _rope_factor(model), _is_latent(model))


def _is_latent(model: NativeModel) -> bool:
    lengths = (model.metadata(f"{model.arch}.attention.{part}_length_mla") for part in ("key", "value"))
    return all(length is not None and int(length) > 0 for length in lengths)


def _rope_factor(model: NativeModel) -> str | None:
    scaling = model.metadata(f"{model.arch}.rope.scaling.type") or "none"
    if scaling in _SCALED_ROPE:
        return f"the model's RoPE scaling is {scaling}: a shift multiplies every key, moved or not"
    factor = model.metadata(f"{model.arch}.rope.scaling.attn_factor")
    if factor is not None and float(factor) != 1.0:
        return f"the model's attention factor is {factor}: a shift multiplies every key, moved or not"
    return None


def gates_of(
    facts: MemoryFacts, *, keys: KeyStore, cold_budget: int, can_shift: bool, no_scores: str | None = NO_SCORES
) -> Gates:
    """The gates. `can_shift` is the engine's answer; on a windowed model it means that both caches have one size.

    `no_scores` says why there are no attention scores; None that there may be.
    """
    reasons = {"sparse_attention": _NO_SPARSE}
    reasons |= _memory_reasons(facts, can_shift)
    if no_scores is not None:
        reasons["attention_scores"] = no_scores
    shift = _shift_reason(facts, keys, can_shift)
    if shift is not None:
        reasons.setdefault("position_shift", shift)
    if cold_budget <= 0:
        reasons.setdefault("cold_store", "the session was opened without a cold budget")
    if not facts.window:
        reasons["sliding_window_attention_tokens"] = "the model has no sliding window"
    flags = {f.name: f.name not in reasons for f in fields(Capabilities) if isinstance(f.default, bool)}
    return Gates(Capabilities(**flags, sliding_window_attention_tokens=facts.window), reasons)


def _memory_reasons(facts: MemoryFacts, equal_caches: bool) -> dict[str, str]:
    if facts.kind in ("recurrent", "hybrid"):
        what = f"the model's memory is {facts.kind}: its state sums up all tokens and no token can be taken out"
        surgery = ("remove_tail", "remove_middle", "position_shift", "cold_store", "recompute_range")
        return dict.fromkeys(surgery, what)
    if facts.kind == "plain":
        return {}
    span = f"the windowed layers keep only the last {facts.window} rows of a range"
    if equal_caches:
        return {"cold_store": f"{span} when it is exported"}
    lost = f"{span}, so older ones that would be seen again are gone (option swa_full=yes keeps them)"
    return {"cold_store": lost, "recompute_range": lost, "remove_tail": lost}


def no_scores_reason(facts: MemoryFacts) -> str | None:
    """Why attention on this kind of memory has no meaning or no probe; None where it may be tried."""
    if facts.kind in ("recurrent", "hybrid"):
        return f"the model's memory is {facts.kind}: not every layer pays attention to tokens"
    if facts.kind == "windowed":
        return "a probe's tokens may take the places of windowed rows that the session still holds"
    return None


def _shift_reason(facts: MemoryFacts, keys: KeyStore, can_shift: bool) -> str | None:
    if facts.multi_rope:
        return "M-RoPE positions have several components, which the engine cannot shift"
    if facts.rope_factor is not None:
        return facts.rope_factor
    if keys.kv_type == "bf16":
        return "the engine cannot rotate bf16 keys; use kv_type_k f16 or f32"
    if keys.kv_type in PACKED_TYPES and (reason := _packed_reason(keys)) is not None:
        return reason
    if facts.kind == "windowed" and not can_shift:
        return "the full and the windowed cache differ in size (option swa_full=yes makes them equal)"
    if not can_shift:
        return "the engine says that this memory cannot shift"
    return None


def _packed_reason(keys: KeyStore) -> str | None:
    instead = "use kv_type_k f16 or f32"
    if not keys.spread:
        why = "heads are no multiple of 64, or LLAMA_ATTN_ROT_DISABLE is set"
        return f"the engine crashes when it rotates {keys.kv_type} keys that it does not spread ({why}); {instead}"
    if not keys.whole_heads:
        return f"the engine aborts when it rotates {keys.kv_type} keys of which RoPE turns a part; {instead}"
    if keys.kv_type in NARROW and not keys.shift_narrow:
        return (
            f"every shift rounds {keys.kv_type} keys again, and they drift; use kv_type_k q8_0, f16 or f32, or allow "
            "it with option shift_quantised=yes"
        )
    return None
