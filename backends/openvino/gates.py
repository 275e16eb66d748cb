"""Which files this backend takes, and what a session on one of them can do.

Both are allow-lists of what was proven: the frontend loads more architectures and tensor types than it computes
rightly, and says nothing about it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvtape.backends.errors import EnvironmentProblem, UsageError
from kvtape.capacity.model import ModelShape
from kvtape.planner.capabilities import Capabilities

__all__ = ["ARCHITECTURES", "Gate", "check_model", "gate"]

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Compared with an independent implementation; others may convert, but their numbers are not shown to be right."""

_EXACT_TYPES = frozenset({"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q3_K", "Q5_K", "Q6_K"})
_Q4_K_SWITCH = "OV_GGUF_Q4_K_ZP_F16"
# The frontend reads the switch once. A value set after this import may come too late, so it does not count.
_Q4_K_EXACT = os.environ.get(_Q4_K_SWITCH) == "1"

_SURGERY = ("remove_tail", "remove_middle", "position_shift", "cold_store")
_FLAGS = tuple(Capabilities.__dataclass_fields__)


def check_model(model: ModelShape) -> None:
    """Raises UsageError for a file that would compute something else, EnvironmentProblem where a switch helps."""
    if model.arch not in ARCHITECTURES:
        raise UsageError(
            f"{model.path}: architecture {model.arch!r} is not proven on OpenVINO; use {', '.join(ARCHITECTURES)}, or "
            "another backend"
        )
    if model.sliding_window:
        raise UsageError(
            f"{model.path}: its sliding window is applied by OpenVINO but not by llama.cpp; use llama alone"
        )
    types = model.tensor_types
    unknown = sorted(types - _EXACT_TYPES - {"Q4_K"})
    if unknown:
        raise UsageError(
            f"{model.path}: OpenVINO does not read {', '.join(unknown)} tensors exactly; use the llama backend"
        )
    if "Q4_K" in types and not _Q4_K_EXACT:
        raise EnvironmentProblem(
            f"{model.path}: OpenVINO rounds the offsets of its Q4_K tensors; set "
            f"{_Q4_K_SWITCH}=1 before the process starts"
        )


@dataclass(frozen=True, slots=True)
class Gate:
    """A session's capabilities and, for each false one, the reason."""

    capabilities: Capabilities
    reasons: dict[str, str]

    def refusal(self, operation: str) -> str | None:
        """Raises ValueError for a name that is no capability."""
        if operation not in _FLAGS:
            raise ValueError(f"{operation!r} is no capability; known: {', '.join(_FLAGS)}")
        return self.reasons.get(operation)


def gate(
    *, mirror: bool, scores: bool, cold_budget_tokens: int, no_rotation: str | None, unproven: str | None = None
) -> Gate:
    """`no_rotation`: why the probe found no rotation; None when it did. `unproven`: why rows that are kept with a loss
    may not be cut, moved or put back (they are not certified, and nobody waived it); None where they may."""
    reasons = {
        # Each sparse option has a proof row: docs/continuous-batching.md.
        "sparse_attention": "sessions compute dense attention; XAttention on the CPU gives wrong output for a prompt "
        "in pieces, at every threshold (kvtape eval --task batching --prove-options)",
        "sliding_window_attention_tokens": "the model has no sliding window",
    }
    if not scores:
        reasons["attention_scores"] = "this session was opened without a score source (option scores=on)"
    if not mirror:
        why = "it needs the host copy of the rows, which mirror=off turns off"
        reasons |= dict.fromkeys(_SURGERY, why)
    elif unproven is not None:
        reasons |= dict.fromkeys(_SURGERY, unproven)
    elif no_rotation is not None:
        reasons["position_shift"] = no_rotation
    if "cold_store" not in reasons and cold_budget_tokens <= 0:
        reasons["cold_store"] = "no cold budget was given (cold_budget_tokens is 0)"
    able = {name: name not in reasons for name in _FLAGS if name != "sliding_window_attention_tokens"}
    return Gate(Capabilities(**able, sliding_window_attention_tokens=0), reasons)
