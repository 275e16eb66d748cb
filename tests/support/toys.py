"""Toy backends with the sizes that tests like."""

from __future__ import annotations

from kvtape.backends.protocol import SessionConfig
from kvtape.planner.capabilities import Capabilities
from kvtape.testing.toy import TOY_CAPABILITIES, ToyBackend

__all__ = ["toy_backend"]


def toy_backend(
    n_ctx: int = 64,
    capabilities: Capabilities = TOY_CAPABILITIES,
    cold_budget_tokens: int = 0,
    chunk: int = 16,
    n_ctx_train: int = 1 << 20,
    cold_budget_bytes: int = 0,
) -> ToyBackend:
    """A toy with these abilities, whatever its configuration says."""
    config = SessionConfig(
        n_ctx=n_ctx, chunk=chunk, cold_budget_tokens=cold_budget_tokens, cold_budget_bytes=cold_budget_bytes
    )
    return ToyBackend(config, capabilities, n_ctx_train=n_ctx_train)
