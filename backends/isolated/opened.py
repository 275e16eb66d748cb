"""What a session says about itself when it opens in a host."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvtape.backends.protocol import Backend, ModelFacts, SessionConfig
from kvtape.planner.capabilities import Capabilities

__all__ = ["Opened"]


@dataclass(frozen=True, slots=True)
class Opened:
    """The attributes of a `protocol.Backend`, the reason of each false capability, and whether it has `abort_next`."""

    name: str
    engine_version: str
    facts: ModelFacts
    config: SessionConfig
    n_ctx: int
    capabilities: Capabilities
    refusals: dict[str, str | None]
    can_abort: bool

    @classmethod
    def of(cls, backend: Backend) -> Opened:
        return cls(
            name=backend.name,
            engine_version=backend.engine_version,
            facts=backend.facts,
            config=backend.config,
            n_ctx=backend.n_ctx,
            capabilities=backend.capabilities,
            refusals={f.name: backend.refusal(f.name) for f in fields(Capabilities)},
            can_abort=callable(getattr(backend, "abort_next", None)),
        )
