"""What a modelled session is a model of."""

from __future__ import annotations

from dataclasses import dataclass

from kvtape.backends.errors import UsageError
from kvtape.backends.protocol import ModelFacts, SessionConfig
from kvtape.planner.capabilities import Capabilities

__all__ = ["Shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The engine session that is modelled. `n_ctx` effective, tokens; `row_bytes` of KV for one resident token.

    `stands_for`: the engine whose costs and abilities these are, as text.
    """

    facts: ModelFacts
    config: SessionConfig
    n_ctx: int
    capabilities: Capabilities
    row_bytes: int
    stands_for: str = "none"

    def __post_init__(self) -> None:
        if self.n_ctx < 2:
            raise UsageError(f"a modelled context of {self.n_ctx} tokens; it needs at least 2")
        if self.config.chunk < 1:
            raise UsageError(f"a modelled chunk of {self.config.chunk} tokens; it needs at least 1")
        if self.row_bytes < 0:
            raise UsageError(f"{self.row_bytes} bytes for a row of KV; it cannot be negative")
