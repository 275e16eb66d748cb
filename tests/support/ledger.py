"""A backend of books only, for tests of the Session itself: no arithmetic, every rule of the protocol checked.

It stands beside the real engines' tests and never in their place.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtape.backends.envelope import unwrap, wrap
from kvtape.backends.errors import Cancelled, EngineFault, FatalClass, UnsupportedOperation
from kvtape.backends.protocol import (
    AttentionMass,
    Choose,
    Computed,
    DecodeRun,
    Logits,
    ModelFacts,
    SessionConfig,
    Witness,
)
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.events import Event
from kvtape.planner.layout import Layout, Segment, normalise
from kvtape.planner.ranges import RangeSet
from kvtape.planner.rows import BlockRow, PlanRow, SessionRow

__all__ = ["ALL_CAPABILITIES", "LedgerBackend", "ListSink"]

ALL_CAPABILITIES = Capabilities(
    remove_tail=True,
    remove_middle=True,
    position_shift=True,
    cold_store=True,
    recompute_range=True,
    snapshot_state=True,
)
N_VOCAB = 64


@dataclass
class ListSink:
    """Keeps what a session records."""

    sessions: list[SessionRow] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    plans: list[PlanRow] = field(default_factory=list)
    blocks: list[BlockRow] = field(default_factory=list)

    def open_session(self, row: SessionRow) -> None:
        self.sessions.append(row)

    def record(
        self,
        event: Event,
        *,
        tokens: Sequence[int] | None = None,
        plan: PlanRow | None = None,
        blocks: Sequence[BlockRow] = (),
    ) -> None:
        self.events.append(event)
        if tokens is not None:
            self.tokens[event.seq] = tuple(tokens)
        if plan is not None:
            self.plans.append(plan)
        self.blocks += blocks

    def flush(self) -> int:
        return len(self.events)


@dataclass
class _Row:
    tape: int
    cache: int
    token: int


class LedgerBackend:
    """Rows are (tape, cache, token). `faults` names operations that fail at their next call."""

    name = "ledger"
    engine_version = "1"

    def __init__(
        self,
        n_ctx: int = 64,
        capabilities: Capabilities = ALL_CAPABILITIES,
        cold_budget_tokens: int = 0,
        chunk: int = 16,
        n_ctx_train: int = 1 << 20,
    ) -> None:
        self.facts = ModelFacts("ledger.gguf", "ledger", "ledger", N_VOCAB, n_ctx_train, frozenset())
        self.config = SessionConfig(n_ctx=n_ctx, chunk=chunk, cold_budget_tokens=cold_budget_tokens)
        self.n_ctx = n_ctx
        self.capabilities = capabilities
        self.rows: list[_Row] = []
        self.faults: set[str] = set()
        self.cancel_after: int | None = None
        self.closed = 0
        self.operations: list[str] = []

    def refusal(self, operation: str) -> str | None:
        return None if getattr(self.capabilities, operation, False) else f"the ledger was opened without {operation}"

    def prefill(self, tokens: Sequence[int], tape_start: int) -> Computed:
        self._enter("prefill")
        assert 0 < len(tokens) <= self.config.chunk or self.config.chunk == 0
        if self.cancel_after is not None:
            self.cancel_after -= 1
            if self.cancel_after < 0:
                self.cancel_after = None
                raise Cancelled("cancelled")
        self._put(tokens, tape_start, self._next())
        return Computed(self._logits(), 1, len(tokens))

    def decode_until(self, n: int, limit: int, tape_start: int, logits: Logits, choose: Choose) -> DecodeRun:
        self._enter("decode")
        out: list[int] = []
        while len(out) < n:
            if len(self.rows) >= limit:
                return DecodeRun(tuple(out), logits, len(out), "limit")
            token = choose(logits)
            if token is None:
                return DecodeRun(tuple(out), logits, len(out), "chosen_none")
            self._put([token], tape_start + len(out), self._next())
            out.append(token)
            logits = self._logits()
        return DecodeRun(tuple(out), logits, len(out), "n")

    def truncate(self, tape_stop: int) -> None:
        self._enter("truncate")
        doomed = [r for r in self.rows if r.tape >= tape_stop]
        tail = doomed == self.rows[len(self.rows) - len(doomed) :]
        self._need("remove_tail" if tail else "remove_middle")
        self.rows = [r for r in self.rows if r.tape < tape_stop]

    def evict(self, start: int, stop: int) -> None:
        self._enter("evict")
        self._need("remove_middle")
        assert sum(start <= r.tape < stop for r in self.rows) == stop - start, "evicting rows that are not there"
        self.rows = [r for r in self.rows if not start <= r.tape < stop]

    def shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        self._enter("shift")
        self._need("position_shift")
        for r in self.rows:
            if cache_start <= r.cache < cache_stop:
                r.cache += delta
        self._check()

    def export_block(self, start: int, stop: int) -> bytes:
        self._enter("export")
        self._need("cold_store")
        rows = [r for r in self.rows if start <= r.tape < stop]
        assert len(rows) == stop - start
        return wrap({"kind": "block", "n_tokens": len(rows)}, json.dumps([r.token for r in rows]).encode())

    def admit(self, block: bytes, start: int, cache_start: int) -> None:
        self._enter("admit")
        self._need("cold_store")
        _, payload = unwrap(block, {"kind": "block"})
        self._put(json.loads(payload), start, cache_start)

    def refill(self, tokens: Sequence[int], start: int, cache_start: int) -> Computed:
        self._enter("refill")
        self._need("recompute_range")
        self._put(tokens, start, cache_start)
        return Computed(self._logits(), 1, len(tokens))

    def rebuild(self, ranges: RangeSet, tokens: Sequence[int]) -> Computed:
        self._enter("rebuild")
        positions = [p for r in ranges for p in range(r.start, r.stop)]
        self.rows = [_Row(p, i, t) for i, (p, t) in enumerate(zip(positions, tokens, strict=True))]
        return Computed(self._logits(), 1, len(tokens))

    def snapshot(self) -> bytes:
        self._enter("snapshot")
        self._need("snapshot_state")
        return wrap({"kind": "snapshot"}, json.dumps([(r.tape, r.cache, r.token) for r in self.rows]).encode())

    def restore(self, snapshot: bytes) -> None:
        self._enter("restore")
        _, payload = unwrap(snapshot, {"kind": "snapshot"})
        self.rows = [_Row(*row) for row in json.loads(payload)]

    def score(self, tokens: Sequence[int], tape_start: int, layers: Sequence[int] | None = None) -> AttentionMass:
        raise UnsupportedOperation("score", "a ledger computes no attention")

    def take_mass(self) -> AttentionMass:
        raise UnsupportedOperation("take_mass", "a ledger computes no attention")

    def books(self) -> Layout:
        return normalise(Segment(r.tape, 1, r.cache) for r in self.rows)

    def witness(self) -> Witness:
        raise UnsupportedOperation("witness", "a ledger has no memory to read")

    def kv_bytes(self) -> dict[str, int]:
        return {"resident": len(self.rows), "allocated": self.n_ctx}

    def cancel(self) -> None:
        self.cancel_after = 0

    def close(self) -> None:
        self.closed += 1

    def _enter(self, operation: str) -> None:
        assert not self.closed, f"{operation} on a closed backend"
        self.operations.append(operation)
        if operation in self.faults:
            fault = FatalClass.DECODE_FAILED if operation == "decode" else FatalClass.PREFILL_FAILED
            raise EngineFault(fault, f"planted in {operation}")

    def _need(self, capability: str) -> None:
        if not getattr(self.capabilities, capability):
            raise UnsupportedOperation(capability, self.refusal(capability) or "")

    def _next(self) -> int:
        return max((r.cache for r in self.rows), default=-1) + 1

    def _put(self, tokens: Sequence[int], tape: int, cache: int) -> None:
        self.rows += [_Row(tape + i, cache + i, t) for i, t in enumerate(tokens)]
        self._check()

    def _check(self) -> None:
        self.rows.sort(key=lambda r: r.cache)
        assert len({r.cache for r in self.rows}) == len(self.rows), "two rows at one cache position"
        assert len({r.tape for r in self.rows}) == len(self.rows), "one tape position twice"
        assert len(self.rows) <= self.n_ctx, "more rows than the context holds"

    def _logits(self) -> Logits:
        out = np.zeros(N_VOCAB, np.float32)
        out[(sum(r.token for r in self.rows) + len(self.rows)) % N_VOCAB] = 1.0
        return out
