"""What a session on the reference can do: everything, where the rows are its own; what its KV engine can, elsewhere."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from kvtape.backends.gates import Gates
from kvtape.backends.reference.model.architecture import Architecture
from kvtape.planner.capabilities import Capabilities

__all__ = ["gates_of"]

_SURGERY: Final = ("remove_tail", "remove_middle", "position_shift", "cold_store")


def gates_of(arch: Architecture, *, engine: str, cold_budget: int, scores: bool) -> Gates:
    """`engine`: canonical spec. Every layer's rows stay until they are taken out, those outside of a window too."""
    window = max(arch.windows)
    reasons = {"sparse_attention": "the reference computes every weight of attention"}
    if not window:
        reasons["sliding_window_attention_tokens"] = "the model has no sliding window"
    if engine != "standard":
        why = (
            f"{engine} keeps its state in a form of its own, which no row can be taken out of; engine=standard has rows"
        )
        reasons |= dict.fromkeys(_SURGERY, why)
    elif cold_budget <= 0:
        reasons["cold_store"] = "the session was opened without a cold budget"
    if not scores:
        reasons["attention_scores"] = "the session was opened without a score source (option scores=on)"
    flags = {f.name: f.name not in reasons for f in fields(Capabilities) if isinstance(f.default, bool)}
    return Gates(Capabilities(**flags, sliding_window_attention_tokens=window), reasons)
