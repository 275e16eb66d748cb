"""Toy backends with the sizes that tests like, and sessions on them."""

from __future__ import annotations

from kvtape.backends.clock import ManualClock
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink
from kvtape.testing.toy import TOY_CAPABILITIES, ToyBackend

__all__ = ["ops", "toy_backend", "toy_session"]


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


def toy_session(policy: str = "none", **backend: object) -> tuple[Session, ToyBackend, ListSink]:
    """A session of `policy` on a `toy_backend`, and what it records."""
    toy = toy_backend(**backend)  # type: ignore[arg-type]
    sink = ListSink()
    session = Session(toy, parse_policy(policy), sink, ManualClock(), run_id="r", session_id="s")
    return session, toy, sink


def ops(sink: ListSink) -> list[str]:
    """The operations recorded, in order."""
    return [str(e.op) for e in sink.events]
