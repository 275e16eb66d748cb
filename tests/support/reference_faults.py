"""Faults planted in the forward of the reference, wherever a layer can stop."""

from __future__ import annotations

from typing import Any

import pytest

from kvtape.backends.reference.engines.state_dump import Dumping
from kvtape.backends.reference.model import dispatch

__all__ = ["STAGES", "Planted", "plant"]

STAGES = ("qkv", "rows taken in", "attention_of", "attn_out", "ffn")


class Planted(Exception):
    """Raised by a planted fault, and by nothing else."""


class _Fault:
    def __init__(self, layer: int) -> None:
        self.layer, self.fired = layer, False

    def at(self, layer: int) -> None:
        if layer == self.layer and not self.fired:
            self.fired = True
            raise Planted(f"layer {layer}")


def plant(patch: pytest.MonkeyPatch, stage: str, layer: int) -> None:
    """Fail once in `layer`: before the named step of it or, for `rows taken in`, behind what the engine does."""
    fault = _Fault(layer)
    if stage == "rows taken in":
        real = Dumping.seen

        def seen(self: Dumping, at: int, new: Any) -> Any:
            answer = real(self, at, new)
            fault.at(at)
            return answer

        patch.setattr(Dumping, "seen", seen)
        return
    step = getattr(dispatch, stage)

    def failing(weights: Any, at: int, *rest: Any) -> Any:
        fault.at(at)
        return step(weights, at, *rest)

    patch.setattr(dispatch, stage, failing)
