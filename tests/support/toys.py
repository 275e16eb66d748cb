"""Toy backends with the sizes that tests like, and sessions on them."""

from __future__ import annotations

from kvtape.backends.clock import ManualClock
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink
from kvtape.testing.toy import TOY_CAPABILITIES, ToyBackend

__all__ = ["POLICIES", "ops", "toy_backend", "toy_session"]

POLICIES = (
    "none",
    "none:hole=forget,block=4",
    "stream:sink=2,recent=9,block=4",
    "stream:sink=0,recent=5,positions=rebased,block=8",
    "stream:sink=3,recent=7,hole=refill,split=no,block=4",
    "class:budget=24,block=4",
    "class:budget=20,hole=forget,every=5,recent=3,block=4",
    "h2o:budget=22,recent=4,block=4",
    "h2o:budget=26,recent=2,sink=3,norm=mean,every=3,block=4",
    "snapkv:budget=20,window=3,pool=3,block=4",
    "tova:budget=18,grace=4,block=4",
    "random:budget=20,seed=3,block=4",
)
"""One of every kind, for a context of 48 to 64 tokens."""


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
