"""A modelled engine as an engine under test: the toy's abilities, a nanosecond a token."""

from __future__ import annotations

from collections.abc import Sequence

from kvtape.backends.asked import effective_n_ctx
from kvtape.backends.modelled.backend import ModelledBackend
from kvtape.backends.modelled.clock import VirtualTimeline
from kvtape.backends.modelled.shape import Shape
from kvtape.backends.modelled.work import Work
from kvtape.backends.protocol import ModelFacts, SessionConfig
from kvtape.testing.toy import TOY_CAPABILITIES

__all__ = ["ModelledEngine"]


class _TokenPrice:
    def cost_ns(self, work: Work) -> int:
        return work.tokens


class ModelledEngine:
    """Every session a modelled backend with a timeline of its own."""

    name, version = "modelled", "1"

    def __init__(self) -> None:
        self.facts = ModelFacts("toy", "toy/1", "toy", 64, 1 << 20, frozenset())

    def tokenize(self, text: str) -> list[int]:
        return [ord(c) % self.facts.n_vocab for c in text]

    def detokenize(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def open(self, config: SessionConfig) -> ModelledBackend:
        shape = Shape(self.facts, config, effective_n_ctx(config.n_ctx), TOY_CAPABILITIES, 7, "toy")
        return ModelledBackend(shape, _TokenPrice(), VirtualTimeline())

    def close(self) -> None:
        pass
