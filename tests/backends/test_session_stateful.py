"""Any order of Session operations: fold, tape, catalog, cold store and backend books stay one account."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import KvtapeError, SessionFatal
from kvtape.backends.session import Session
from kvtape.planner.events import Placement
from kvtape.planner.plan import PlanError
from kvtape.planner.residency import fold
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink
from kvtape.testing.toy import TOY_CAPABILITIES
from support.toys import toy_backend

POLICIES = (
    "none",
    "none:hole=forget,block=4",
    "stream:sink=2,recent=9,block=4",
    "stream:sink=0,recent=5,positions=rebased,block=8",
    "stream:sink=3,recent=7,hole=refill,split=no,block=4",
    "class:budget=24,block=4",
    "class:budget=20,hole=forget,every=5,recent=3,block=4",
)
TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=50)


class SessionMachine(RuleBasedStateMachine):
    snapshots = Bundle("snapshots")

    @initialize(
        policy=st.sampled_from(POLICIES),
        cold=st.sampled_from([0, 8, 64]),
        n_ctx=st.sampled_from([32, 48]),
        flags=st.fixed_dictionaries({}, optional={"recompute_range": st.just(False), "cold_store": st.just(False)}),
        recompute=st.booleans(),
    )
    def open(self, policy: str, cold: int, n_ctx: int, flags: dict[str, bool], recompute: bool) -> None:
        caps = dataclasses.replace(TOY_CAPABILITIES, **flags)
        self.backend = toy_backend(n_ctx, caps, cold, chunk=8, n_ctx_train=200)
        self.sink = ListSink()
        self.session = Session(
            self.backend,
            parse_policy(policy),
            self.sink,
            ManualClock(),
            run_id="r",
            session_id="s",
            evict_by="recompute" if recompute and caps.recompute_range else "native",
        )
        self.tapes: dict[int, tuple[int, ...]] = {}

    def attempt(self, call: Any) -> bool:
        """Run an operation; a typed refusal is fine and must leave the rows alone unless it had begun."""
        try:
            call()
        except SessionFatal:
            raise
        except (KvtapeError, PlanError):
            return False
        return True

    @rule(tokens=TOKENS, keep=st.integers(0, 60), logits=st.booleans())
    def turn(self, tokens: list[int], keep: int, logits: bool) -> None:
        prompt = [*self.session.tape[:keep], *tokens]
        if self.attempt(lambda: self.session.ensure_prefix(prompt, need_logits=logits)):
            assert self.session.tape == tuple(prompt)

    @rule(tokens=TOKENS)
    def suffix(self, tokens: list[int]) -> None:
        before = self.session.tape
        if self.attempt(lambda: self.session.prefill_suffix(tokens)):
            assert self.session.tape == (*before, *tokens)

    @rule(n=st.integers(1, 45))
    def decode(self, n: int) -> None:
        self.attempt(lambda: self.session.decode(n))

    @rule(a=st.integers(0, 60), n=st.integers(1, 12))
    def evict(self, a: int, n: int) -> None:
        self.attempt(lambda: self.session.evict(a, a + n))

    @precondition(lambda self: self.session.cold_block_ids)
    @rule(data=st.data(), placement=st.sampled_from(Placement))
    def admit(self, data: st.DataObject, placement: Placement) -> None:
        block = data.draw(st.sampled_from(self.session.cold_block_ids))
        self.attempt(lambda: self.session.admit(block, placement))

    @rule()
    def compact(self) -> None:
        self.attempt(self.session.compact)

    @rule(target=snapshots)
    def snapshot(self) -> int:
        number = self.session.snapshot()
        self.tapes[number] = self.session.tape
        return number

    @rule(number=snapshots)
    def restore(self, number: int) -> None:
        self.session.restore(number)
        assert self.session.tape == self.tapes[number]

    @rule(token=st.sampled_from([-1, 64, 2**40]))
    def bad_token(self, token: int) -> None:
        books = self.backend.books()
        assert not self.attempt(lambda: self.session.prefill_suffix([token]))
        assert self.backend.books() == books

    @invariant()
    def one_account(self) -> None:
        parts = self.session._parts
        state = parts.state
        assert self.backend.books() == state.layout
        assert [r.token for r in sorted(self.backend.rows, key=lambda r: r.tape)] == parts.tokens_of(state.resident)
        assert len(parts.tape) == state.tape_length == parts.catalog.tape_length
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
    max_examples=120, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSessionMachine.pytestmark = [pytest.mark.timeout(200)]
