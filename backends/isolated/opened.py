"""What a session says about itself when it opens in a host."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvtape.backends.protocol import Backend, ModelFacts, SessionConfig
from kvtape.backends.verifying import as_verifier
from kvtape.planner.capabilities import Capabilities

__all__ = ["Opened"]


@dataclass(frozen=True, slots=True)
class Opened:
    """The attributes of a `protocol.Backend`, the reason of each false capability, whether it has `abort_next`, and why
    it does not verify drafts, if so.
    """

    name: str
    engine_version: str
    facts: ModelFacts
    config: SessionConfig
    n_ctx: int
    capabilities: Capabilities
    refusals: dict[str, str | None]
    can_abort: bool
    verify_refusal: str | None
    verify_margin: float

    @classmethod
    def of(cls, backend: Backend) -> Opened:
        verifier = as_verifier(backend)
        return cls(
            name=backend.name,
            engine_version=backend.engine_version,
            facts=backend.facts,
            config=backend.config,
            n_ctx=backend.n_ctx,
            capabilities=backend.capabilities,
            refusals={f.name: backend.refusal(f.name) for f in fields(Capabilities)},
            can_abort=callable(getattr(backend, "abort_next", None)),
            verify_refusal=verifier if isinstance(verifier, str) else None,
            verify_margin=0.0 if isinstance(verifier, str) else verifier.verify_margin,
        )
