"""What the pieces of one session share."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvtape.backends.catalog import BlockCatalog
from kvtape.backends.cold_store import ColdStore
from kvtape.backends.errors import UnsupportedOperation
from kvtape.backends.journal import Journal
from kvtape.backends.pending import Pending
from kvtape.backends.proofs.knobs import BASE, Precision
from kvtape.backends.protocol import AttentionMass, Backend, Logits
from kvtape.backends.speculation.drafter import Drafter
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.events import Way
from kvtape.planner.ranges import RangeSet
from kvtape.planner.residency import ResidencyState
from kvtape.planner.rows import PlanRow, SessionRow
from kvtape.planner.scores import MassHistory
from kvtape.planner.specs import PolicySpec

__all__ = ["Parts", "session_row"]


@dataclass(slots=True)
class Parts:
    """Backend, journal (fold and log), tape of token ids, block catalog, cold store and policy of one session.

    `tape` is what was computed; what waits behind it is `pending`, always empty without deferred prefill.
    """

    backend: Backend
    journal: Journal
    catalog: BlockCatalog
    policy: PolicySpec
    cold: ColdStore | None
    allow_recompute: bool
    evict_by_recompute: bool
    tape: list[int] = field(default_factory=list)
    pending: Pending = field(default_factory=Pending)
    logits: Logits | None = None
    tokens_since_plan: int = 0
    evictions: int = 0
    last_plan: PlanRow | None = None
    history: MassHistory = field(default_factory=MassHistory)
    carried: AttentionMass | None = None
    probed: AttentionMass | None = None
    precision: Precision = BASE
    drafter: Drafter | None = None
    shortest: int = 0
    """Tokens of the tape when it was shortest since a shadow last followed it."""

    @property
    def state(self) -> ResidencyState:
        return self.journal.state

    @property
    def n_ctx(self) -> int:
        return self.state.n_ctx

    @property
    def free_rows(self) -> int:
        """Rows that fit before the effective context is full."""
        return self.n_ctx - self.state.resident_tokens

    @property
    def ways(self) -> tuple[Way, ...]:
        """The ways that may carry out an evict here, the cheapest first."""
        ways = self.policy.ways(self.capabilities, self.allow_recompute)
        return tuple(w for w in ways if w is Way.RECOMPUTE) if self.evict_by_recompute else ways

    @property
    def capabilities(self) -> Capabilities:
        """The backend's, less what its precision did not pass certification for."""
        return self.precision.left_of(self.backend.capabilities)

    def refusal(self, capability: str) -> str | None:
        """Why a capability is false; None where it is true."""
        return self.backend.refusal(capability) or self.precision.withheld.get(capability)

    def now(self) -> int:
        return self.journal.clock.now_ns()

    def require(self, operation: str, capability: str) -> None:
        """Raises UnsupportedOperation where the backend lacks the capability that the operation needs."""
        if not getattr(self.capabilities, capability):
            raise UnsupportedOperation(operation, self.refusal(capability) or f"no {capability}")

    def tokens_of(self, ranges: RangeSet) -> list[int]:
        return [t for r in ranges for t in self.tape[r.start : r.stop]]

    def resident_bytes(self) -> int:
        return self.backend.kv_bytes()["resident"]


def session_row(parts: Parts, run_id: str, session_id: str, *, content: bool) -> SessionRow:
    """What was asked and what came of it, as the log keeps it."""
    backend = parts.backend
    config = backend.config
    return SessionRow(
        run_id=run_id,
        session_id=session_id,
        backend=backend.name,
        engine_version=backend.engine_version,
        model_fingerprint=backend.facts.fingerprint,
        model_name=Path(backend.facts.path).name,
        policy=parts.policy.canonical,
        n_ctx_asked=config.n_ctx,
        n_ctx=backend.n_ctx,
        chunk=config.chunk,
        kv_type_k=config.kv_type_k,
        kv_type_v=config.kv_type_v,
        flash_attention=config.flash_attention == "on",
        threads=config.threads,
        cold_budget_tokens=config.cold_budget_tokens,
        cold_budget_bytes=config.cold_budget_bytes,
        capabilities=json.dumps(asdict(parts.capabilities), sort_keys=True),
        content=content,
    )
