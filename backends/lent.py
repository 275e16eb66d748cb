"""An engine that is lent: whoever gets it may close it, and it stays loaded for the others."""

from __future__ import annotations

from collections.abc import Sequence

from kvtape.backends.protocol import Backend, Engine, SessionConfig

__all__ = ["LentEngine"]


class LentEngine:
    """The engine, but for its end, which is its owner's."""

    def __init__(self, engine: Engine) -> None:
        self.name = engine.name
        self.version = engine.version
        self.facts = engine.facts
        self._engine = engine

    def tokenize(self, text: str) -> list[int]:
        return self._engine.tokenize(text)

    def detokenize(self, tokens: Sequence[int]) -> str:
        return self._engine.detokenize(tokens)

    def open(self, config: SessionConfig) -> Backend:
        return self._engine.open(config)

    def close(self) -> None:
        """Nothing."""
