"""Any order of Session operations, faults and cancels included: fold, tape, catalog, cold store, the backend's books
and its memory stay one account, and the fold of what was recorded is the model of all."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import Cancelled, KvtapeError, SessionClosed, SessionFatal
from kvtape.backends.protocol import AttentionMass
from kvtape.backends.session import Session
from kvtape.planner.events import Op, Placement
from kvtape.planner.plan import PlanError
from kvtape.planner.ranges import RangeSet
from kvtape.planner.residency import ResidencyState, apply, check_event, fold
from kvtape.planner.specs import parse_policy
from kvtape.planner.table import BlockTable
from kvtape.testing.sink import ListSink
from kvtape.testing.toy import TOY_CAPABILITIES
from support.toys import POLICIES, toy_backend

PROBED_TOO = (*POLICIES, "snapkv:budget=24,queries=probe,sink=2,block=4")
TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=50)
SWITCHES = (
    "attention_scores",
    "recompute_range",
    "cold_store",
    "position_shift",
    "remove_middle",
    "remove_tail",
    "snapshot_state",
)
FAULTY = (
    "prefill",
    "decode",
    "evict",
    "shift",
    "truncate",
    "admit",
    "refill",
    "rebuild",
    "snapshot",
    "restore",
    "score",
    "take_mass",
)


class SessionMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(PROBED_TOO),
        cold=st.sampled_from([0, 8, 64]),
        n_ctx=st.sampled_from([32, 48]),
        off=st.one_of(st.just(()), st.lists(st.sampled_from(SWITCHES), max_size=3).map(tuple)),
        recompute=st.booleans(),
        defer=st.booleans(),
    )
    def open(self, policy: str, cold: int, n_ctx: int, off: tuple[str, ...], recompute: bool, defer: bool) -> None:
        caps = dataclasses.replace(TOY_CAPABILITIES, attention_scores=True)
        caps = dataclasses.replace(caps, **dict.fromkeys(off, False))
        self.backend = toy_backend(n_ctx, caps, cold, chunk=8, n_ctx_train=200)
        self.sink = ListSink()
        spec = parse_policy(policy)
        if spec.positions == "rebased" and not spec.ways(caps, cold > 0):
            spec = parse_policy("none")  # refused at open; has a test of its own
        self.session = Session(
            self.backend,
            spec,
            self.sink,
            ManualClock(),
            run_id="r",
            session_id="s",
            evict_by="recompute" if recompute and caps.recompute_range else "native",
            defer_prefill=defer,
        )
        self.tapes: dict[int, tuple[int, ...]] = {}
        self.folded = ResidencyState()
        self.n_folded = 0
        self.over = False
        self.cause: str | None = None
        self.session.ensure_prefix(list(range(20)))

    def attempt(self, call: Any) -> bool:
        """Run an operation. A typed refusal is recorded; a fault ends the session with its first cause."""
        n_before, planted = len(self.sink.events), set(self.backend.faults)
        try:
            call()
        except SessionFatal as err:
            if not planted:
                raise
            self.over, self.cause = True, err.cause_message
            return False
        except Cancelled:
            refused = Op.REFUSE in {e.op for e in self.sink.events[n_before:]}
            closed = self.sink.events[-1].op is Op.CLOSE
            assert refused or closed
            self.over = closed
            return False
        except (KvtapeError, PlanError):
            assert self.sink.events[-1].op is Op.REFUSE
            return False
        return True

    def settle(self) -> bool:
        """With nothing that waits: what follows can be compared with what is resident before it."""
        return self.attempt(lambda: self.session.logits) and not self.over

    @precondition(lambda self: not self.over)
    @rule(tokens=TOKENS, keep=st.integers(0, 60), logits=st.booleans(), cancel_after=st.none() | st.integers(0, 4))
    def turn(self, tokens: list[int], keep: int, logits: bool, cancel_after: int | None) -> None:
        prompt = [*self.session.tape[:keep], *tokens]
        self.backend.cancel_after = cancel_after
        done = self.attempt(lambda: self.session.ensure_prefix(prompt, need_logits=logits))
        self.backend.cancel_after = None
        if done:
            assert self.session.tape == tuple(prompt)

    @precondition(lambda self: not self.over)
    @rule(tokens=TOKENS, cancel_after=st.none() | st.integers(0, 4))
    def suffix(self, tokens: list[int], cancel_after: int | None) -> None:
        """All of it, or nothing; only an overflow after an evict leaves what went in, and a cancel then closes."""
        before, evictions = self.session.tape, self.session._parts.evictions
        self.backend.cancel_after = cancel_after
        done = self.attempt(lambda: self.session.prefill_suffix(tokens))
        self.backend.cancel_after = None
        after = self.session.tape
        if done:
            assert after == (*before, *tokens)
        elif self.session._parts.evictions == evictions and not self.over:
            assert after == before
        else:
            assert after == (*before, *tokens)[: len(after)]

    @precondition(lambda self: not self.over)
    @rule(n=st.integers(1, 45), cancel_after=st.none() | st.integers(0, 4))
    def decode(self, n: int, cancel_after: int | None) -> None:
        self.backend.cancel_after = cancel_after
        self.attempt(lambda: self.session.decode(n))
        self.backend.cancel_after = None

    @precondition(lambda self: not self.over)
    @rule(tokens=st.lists(st.integers(0, 5), min_size=1, max_size=6))
    def score(self, tokens: list[int]) -> None:
        """A probe leaves neither rows nor a longer tape, and is about what is resident."""
        if not self.settle():
            return
        rows, tape, logits = self.memory(), self.session.tape, self.session.logits
        found: list[AttentionMass] = []
        if self.attempt(lambda: found.append(self.session.score(tokens))):
            assert self.sink.events[-1].op is Op.SCORE
            assert found[0].tape_positions.tolist() == [
                p for r in self.session.resident for p in range(r.start, r.stop)
            ]
        else:
            assert not self.backend.capabilities.attention_scores
        assert (self.memory(), self.session.tape) == (rows, tape)
        assert self.session.logits is logits

    def memory(self) -> list[bytes]:
        seen = self.backend.witness()
        return [a.tobytes() for a in (seen.cache_positions, *seen.rows.keys, *seen.rows.values)]

    @precondition(lambda self: not self.over)
    @rule(limit=st.none() | st.integers(1, 40))
    def plan_now(self, limit: int | None) -> None:
        """What a plan evicts goes, and nothing else does; the plan is the last one that the session explains."""
        if not self.settle():
            return
        resident, n_before = self.session.resident, len(self.sink.events)
        done = self.attempt(lambda: self.session.plan_now(limit))
        new = self.sink.events[n_before:]
        if done and any(e.op is Op.PLAN for e in new):
            evicted = RangeSet((a, b) for _, a, b in json.loads(self.sink.plans[-1].evict))
            assert self.session.resident == resident - evicted or not self.session._parts.ways
        else:
            assert self.session.resident == resident

    @precondition(lambda self: not self.over)
    @rule(policy=st.sampled_from(PROBED_TOO))
    def set_policy(self, policy: str) -> None:
        """Blocks stay as they were cut: another size is refused."""
        spec = parse_policy(policy)
        before = self.session._parts.policy
        if self.attempt(lambda: self.session.set_policy(spec)):
            assert spec.block == before.block
            assert self.session._parts.policy == spec
        else:
            assert self.session._parts.policy == before

    @rule()
    def the_carried_table_is_what_would_be_built_afresh(self) -> None:
        parts = self.session._parts
        if not self.over:
            table, fresh = (
                parts.catalog.resident_table(parts.state.resident),
                BlockTable(parts.catalog.resident(parts.state.resident)),
            )
            assert table.blocks == fresh.blocks
            assert table.order(False).tolist() == fresh.order(False).tolist()

    @precondition(lambda self: not self.over and self.session.resident)
    @rule(which=st.integers(0, 9), a=st.integers(0, 40), n=st.integers(1, 12), beyond=st.booleans())
    def evict(self, which: int, a: int, n: int, beyond: bool) -> None:
        """Mostly a resident range, sometimes one that reaches past it."""
        runs = self.session.resident.ranges
        run = runs[which % len(runs)]
        start = run.start + a % len(run)
        stop = start + n if beyond else min(start + n, run.stop)
        self.attempt(lambda: self.session.evict(start, stop))

    @precondition(lambda self: not self.over and self.session.cold_block_ids)
    @rule(data=st.data(), placement=st.sampled_from(Placement))
    def admit(self, data: st.DataObject, placement: Placement) -> None:
        block = data.draw(st.sampled_from(self.session.cold_block_ids))
        self.attempt(lambda: self.session.admit(block, placement))

    @precondition(lambda self: not self.over)
    @rule()
    def compact(self) -> None:
        if self.attempt(self.session.compact):
            assert [r.cache for r in self.backend.rows] == list(range(len(self.backend.rows)))

    @precondition(lambda self: not self.over)
    @rule()
    def snapshot(self) -> None:
        taken: list[int] = []
        if self.attempt(lambda: taken.append(self.session.snapshot())):
            self.tapes[taken[0]] = self.session.tape

    @precondition(lambda self: not self.over and self.tapes)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.tapes)))
        if self.attempt(lambda: self.session.restore(number)):
            assert self.session.tape == self.tapes[number]

    @precondition(lambda self: not self.over)
    @rule(token=st.sampled_from([-1, 64, 2**40]))
    def bad_token(self, token: int) -> None:
        books = self.backend.books()
        assert not self.attempt(lambda: self.session.prefill_suffix([token]))
        assert self.backend.books() == books

    @precondition(lambda self: not self.over and len(self.sink.events) > 16)
    @rule(operation=st.sampled_from(FAULTY), tokens=TOKENS, n=st.integers(1, 9))
    def fault(self, operation: str, tokens: list[int], n: int) -> None:
        """The engine fails in one of its operations, if the next ones come to it."""
        self.backend.faults = {operation}
        self.attempt(lambda: self.session.ensure_prefix([*self.session.tape[:20], *tokens]))
        probe = lambda: self.session.score(tokens[:3])  # noqa: E731
        plan = lambda: self.session.plan_now(12)  # noqa: E731
        for call in (self.session.compact, self.session.snapshot, probe, plan, lambda: self.session.decode(n)):
            if not self.over:
                self.attempt(call)
        self.backend.faults = set()

    @precondition(lambda self: self.over)
    @rule()
    def after_the_end(self) -> None:
        """Every later call raises the first cause, or that the session is closed, and reaches no engine."""
        calls, events = len(self.backend.operations), len(self.sink.events)
        expected = SessionClosed if self.cause is None else SessionFatal
        asked = (self.session.snapshot, self.session.plan_now, lambda: self.session.score([1]))
        for call in (lambda: self.session.decode(1), lambda: self.session.ensure_prefix([1]), *asked):
            with pytest.raises(expected) as caught:
                call()
            assert self.cause is None or caught.value.cause_message == self.cause  # type: ignore[attr-defined]
        assert (len(self.backend.operations), len(self.sink.events)) == (calls, events)
        assert self.backend.closed == 1

    def fold_on(self) -> None:
        for event in self.sink.events[self.n_folded :]:
            self.folded = apply(self.folded, event)
            check_event(self.folded, event)
        self.n_folded = len(self.sink.events)
        assert self.folded == self.session._parts.state

    @invariant()
    def one_account(self) -> None:
        self.fold_on()
        parts, state = self.session._parts, self.folded
        assert len(parts.tape) == state.tape_length == parts.catalog.tape_length or self.over
        if self.over:
            last = self.sink.events[-1].op
            assert last is (Op.CLOSE if self.cause is None else Op.FATAL)
            return
        at = len(parts.tape)
        for offer in parts.pending.offers:
            assert offer.start == at
            assert offer.tokens
            at = offer.stop
        assert len(self.session.tape) == at
        assert self.backend.books() == state.layout
        assert [r.token for r in sorted(self.backend.rows, key=lambda r: r.tape)] == parts.tokens_of(state.resident)
        seen = self.backend.witness()
        assert sorted(seen.cache_positions.tolist()) == [r.cache for r in self.backend.rows]
        assert {len(a) for a in (*seen.rows.keys, *seen.rows.values)} == {len(self.backend.rows)}
        assert all(np.isfinite(a).all() for a in seen.rows.keys)
        parts.catalog.check_integrity()
        for block in parts.catalog.blocks():
            inside = [p in state.resident for p in range(block.start, block.stop)]
            assert all(inside) or not any(inside), f"block {block.block_id} is half resident"
        cold = {b.block_id for b in state.cold}
        assert cold == (set() if parts.cold is None else set(parts.cold._entries))

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.session.close()
            assert fold(self.sink.events).closed
            for event in self.sink.events:
                if event.reused is not None:
                    total = event.reused + (event.forgotten or 0) + (event.prefilled or 0)
                    assert total == event.prompt_tokens


TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSessionMachine.pytestmark = [pytest.mark.timeout(200)]
