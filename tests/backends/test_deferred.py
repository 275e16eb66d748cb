"""Deferred prefill on the toy backend: the same as without, in fewer calls; and every way in which it can end."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtape.backends.clock import ManualClock, StoppableClock
from kvtape.backends.errors import Cancelled, ContextOverflow, FatalClass, SessionFatal, UnknownBlock
from kvtape.backends.session import Session
from kvtape.backends.shadow import Shadow
from kvtape.planner.events import Op
from kvtape.planner.ranges import RangeSet
from kvtape.planner.specs import parse_policy
from kvtape.replay.opt_ins import deferral_findings
from kvtape.testing.sink import ListSink
from kvtape.testing.toy import TOY_CAPABILITIES
from kvtape.testing.toy_model import N_VOCAB
from support.deferring import Pair, Sessions, calls, opened
from support.toys import POLICIES, toy_backend

pytestmark = pytest.mark.contract("I6")


def lazy(policy: str = "none", *, n_ctx: int = 64, chunk: int = 16, **more: int) -> Sessions:
    return Sessions(toy_backend(n_ctx, TOY_CAPABILITIES, chunk=chunk, **more), policy, defer=True)


def ops(one: Sessions) -> list[str]:
    return [str(e.op) for e in one.sink.events]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    policy=st.sampled_from(POLICIES),
    script=calls(),
    cold=st.sampled_from([0, 8, 64]),
    scores=st.booleans(),
    recompute=st.booleans(),
)
def test_a_deferring_session_decides_and_keeps_what_an_eager_one_does(
    policy: str, script: list[tuple[str, int, int]], cold: int, scores: bool, recompute: bool
) -> None:
    """Tape, layout, cold blocks, blocks, plans, logits to the bit and generated tokens, wherever nothing waits."""
    caps = dataclasses.replace(TOY_CAPABILITIES, attention_scores=scores)
    make = lambda: toy_backend(48, caps, cold, chunk=8, n_ctx_train=200)  # noqa: E731
    eager, deferring = opened(make, policy, evict_by="recompute" if recompute else "native")
    Pair(eager, deferring, N_VOCAB).play(script)
    eager.session.close()
    deferring.session.close()


def test_prefix_and_suffixes_are_one_call() -> None:
    one = lazy()
    one.session.ensure_prefix([1, 2, 3])
    one.session.prefill_suffix([4, 5])
    one.session.prefill_suffix([6])
    assert one.backend.operations == []  # type: ignore[attr-defined]
    assert one.session.tape == (1, 2, 3, 4, 5, 6)
    assert (one.session.pending_tokens, one.session.resident.n_tokens) == (6, 0)
    one.session.decode(2)
    assert ops(one) == ["open", "prompt", "prompt", "prompt", "prefill", "generate", "decode"]
    (prefill,) = (e for e in one.sink.events if e.op is Op.PREFILL)
    assert (prefill.physical_prefill_calls, prefill.physical_prefill_tokens) == (1, 6)
    assert (prefill.deferred_prefill_calls, prefill.deferred_prefill_tokens) == (3, 6)


def test_pieces_are_full_chunks_whatever_the_calls_were() -> None:
    one = lazy(chunk=8)
    for n in (5, 6, 7):
        one.session.prefill_suffix(list(range(n)))
    one.session.decode(1)
    prefills = [e for e in one.sink.events if e.op is Op.PREFILL]
    assert [e.n_tokens for e in prefills] == [8, 8, 2]
    assert [e.deferred_prefill_calls for e in prefills] == [1, 1, 1]


def test_counters_are_the_turns_and_stand_on_the_prompts() -> None:
    one = lazy()
    one.session.ensure_prefix([1, 2, 3])
    one.session.decode(2)
    tape = one.session.tape
    status = one.session.ensure_prefix([*tape, 7, 8])
    assert (status.reused, status.forgotten, status.prefilled, status.dropped) == (5, 0, 2, 0)
    prompt = one.sink.events[-1]
    assert (prompt.reused, prompt.prefilled, prompt.prompt_tokens) == (5, 2, 7)


def test_a_prompt_that_is_replaced_before_a_decode_is_never_computed() -> None:
    one = lazy()
    one.session.ensure_prefix([1, 2, 3, 4])
    status = one.session.ensure_prefix([1, 2, 9])
    assert (status.reused, status.prefilled, status.dropped) == (0, 3, 0)
    assert one.session.tape == (1, 2, 9)
    one.session.decode(1)
    assert [e.n_tokens for e in one.sink.events if e.op is Op.PREFILL] == [3]
    assert not one.count(Op.TRUNCATE)


def test_a_prompt_that_cuts_the_tape_drops_what_waits_behind_it() -> None:
    one = lazy()
    one.session.ensure_prefix([1, 2, 3, 4])
    one.session.decode(2)
    one.session.prefill_suffix([5, 6])
    one.session.ensure_prefix([1, 2, 9])
    assert one.session.tape == (1, 2, 9)
    assert (one.session.pending_tokens, one.session.resident.n_tokens) == (1, 2)


@pytest.mark.parametrize("how", ["evict", "admit", "compact", "plan_now", "snapshot", "set_policy", "score", "logits"])
def test_what_needs_the_rows_computes_them_first_and_no_decode_is_said_to_have(how: str) -> None:
    caps = dataclasses.replace(TOY_CAPABILITIES, attention_scores=True)
    one = Sessions(toy_backend(64, caps, 32), "none", defer=True)
    one.session.ensure_prefix([1, 2, 3, 4, 5])
    if how == "admit":
        one.session.evict(1, 3)
        one.session.prefill_suffix([6, 7])
    call = {
        "evict": lambda: one.session.evict(1, 3),
        "admit": lambda: one.session.admit(one.session.cold_block_ids[0]),
        "plan_now": lambda: one.session.plan_now(30),
        "set_policy": lambda: one.session.set_policy(one.session._parts.policy),
        "score": lambda: one.session.score([1, 2]),
        "logits": lambda: one.session.logits,
    }.get(how) or getattr(one.session, how)
    call()
    assert one.session.pending_tokens == 0
    prefills = [e for e in one.sink.events if e.op is Op.PREFILL]
    assert prefills
    assert all(e.deferred_prefill_calls is None and e.physical_prefill_calls == 1 for e in prefills)


def test_restore_explain_and_close_compute_nothing() -> None:
    one = lazy()
    one.session.ensure_prefix([1, 2, 3])
    taken = one.session.snapshot()
    one.session.prefill_suffix([4, 5])
    told = one.session.explain()
    assert (told.tape_length, told.pending, told.resident) == (3, 2, [(0, 3)])
    one.session.restore(taken)
    assert (one.session.tape, one.session.pending_tokens) == ((1, 2, 3), 0)
    one.session.prefill_suffix([6])
    one.session.close()
    assert one.count(Op.PREFILL) == 1
    assert one.session.explain().pending == 1


def test_a_restore_that_is_refused_leaves_what_waits() -> None:
    one = lazy()
    one.session.ensure_prefix([1, 2, 3])
    with pytest.raises(UnknownBlock):
        one.session.restore(7)
    assert one.session.pending_tokens == 3


def test_what_cannot_fit_is_refused_when_it_is_offered_and_what_waits_counts() -> None:
    one = lazy(n_ctx=32)
    one.session.ensure_prefix(list(range(20)))
    with pytest.raises(ContextOverflow, match="33 tokens do not fit a context of 32"):
        one.session.prefill_suffix(list(range(13)))
    one.session.prefill_suffix(list(range(12)))
    with pytest.raises(ContextOverflow, match="40 tokens"):
        one.session.ensure_prefix(list(range(40)))
    assert one.session.pending_tokens == 32
    assert one.sink.events[-1].op is Op.REFUSE
    assert one.session.logits is not None


def test_positions_past_the_trained_context_are_refused_when_they_are_offered() -> None:
    one = lazy(n_ctx=64, n_ctx_train=30)
    one.session.ensure_prefix(list(range(20)))
    with pytest.raises(ContextOverflow, match="trained context"):
        one.session.prefill_suffix(list(range(11)))
    one.session.prefill_suffix(list(range(10)))
    assert one.session.logits is not None


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_cancelled_decode_takes_back_what_it_computed_and_a_retry_computes_it(after: int) -> None:
    """In the first, the second piece of what waits, or behind them."""
    one = lazy(chunk=4)
    one.session.ensure_prefix([1, 2, 3])
    one.session.prefill_suffix([4, 5, 6, 7])
    one.backend.cancel_after = after  # type: ignore[attr-defined]
    with pytest.raises(Cancelled):
        one.session.decode(3)
    one.backend.cancel_after = None  # type: ignore[attr-defined]
    computed = after == 2
    assert one.session.tape == (1, 2, 3, 4, 5, 6, 7)
    assert one.session.pending_tokens == (0 if computed else 7)
    assert one.session.resident.n_tokens == (7 if computed else 0)
    said = one.session.decode(3).tokens
    eager = Sessions(toy_backend(64, chunk=4), "none", defer=False)
    eager.session.ensure_prefix([1, 2, 3])
    eager.session.prefill_suffix([4, 5, 6, 7])
    assert said == eager.session.decode(3).tokens
    assert deferral_findings(one.sink.events) == []


def test_a_cancel_before_anything_ran_waits_for_the_decode() -> None:
    one = lazy()
    one.session.cancel()
    one.session.ensure_prefix([1, 2, 3])
    with pytest.raises(Cancelled):
        one.session.decode(1)
    assert one.session.pending_tokens == 3
    assert one.session.decode(1).tokens


def test_a_prefill_that_fails_inside_a_decode_is_fatal_as_a_prefill() -> None:
    one = lazy()
    one.session.ensure_prefix([1, 2, 3])
    one.backend.faults = {"prefill"}  # type: ignore[attr-defined]
    with pytest.raises(SessionFatal) as caught:
        one.session.decode(1)
    assert caught.value.fatal_class is FatalClass.PREFILL_FAILED
    with pytest.raises(SessionFatal):
        _ = one.session.decode(1)
    assert one.session.logits is None


def test_an_overflow_that_only_a_plan_can_tell_comes_with_the_rows() -> None:
    """All of the prompt is evictable by class, so it is taken; without a way to evict it does not fit."""
    caps = dataclasses.replace(TOY_CAPABILITIES, remove_middle=False, recompute_range=False)
    one = Sessions(toy_backend(32, caps, chunk=8), "stream:sink=2,recent=9,block=4", defer=True)
    one.session.ensure_prefix(list(range(40)))
    for _ in range(2):
        with pytest.raises(ContextOverflow):
            one.session.decode(1)
        assert (one.session.pending_tokens, one.session.resident.n_tokens) == (40, 0)
    one.session.ensure_prefix(list(range(10)))
    assert one.session.decode(1).tokens


def test_drafts_are_looked_at_behind_what_waited() -> None:
    """Both opt-ins at once: what neither of them would have said differs in nothing."""
    plain = Sessions(toy_backend(64), "none", defer=False)
    both = Sessions(toy_backend(64), "none", defer=True, speculation="lookup")
    for one in (plain, both):
        one.session.ensure_prefix([1, 2, 3, 1, 2, 3])
        one.session.prefill_suffix([1, 2])
        one.session.decode(12, stop_tokens=frozenset())
        one.session.prefill_suffix([3, 1, 2, 3])
        one.session.decode(6, stop_tokens=frozenset())
    assert both.account() == plain.account()
    assert sum(e.drafted_tokens or 0 for e in both.sink.events) > 0
    assert sum(e.deferred_prefill_calls or 0 for e in both.sink.events) == 3


def test_choose_is_asked_once_nothing_waits() -> None:
    one = lazy()
    one.session.ensure_prefix([1, 2, 3])
    seen: list[int] = []

    def choose(logits: object) -> int:
        seen.append(one.session.pending_tokens)
        return 5

    one.session.decode(2, choose=choose)
    assert seen == [0, 0]


def test_the_shadow_measures_what_a_decode_computed() -> None:
    caps = dataclasses.replace(TOY_CAPABILITIES, attention_scores=True)
    clock = StoppableClock(ManualClock())
    sink = ListSink()
    shadow = Shadow(toy_backend(64, caps), clock, every=4)
    session = Session(
        toy_backend(64, caps),
        parse_policy("none"),
        sink,
        clock,
        run_id="r",
        session_id="s",
        shadow=shadow,
        defer_prefill=True,
    )
    session.ensure_prefix([1, 2, 3, 4, 5])
    assert not [e for e in sink.events if e.op is Op.SCORE]
    session.decode(2)
    measured = RangeSet((e.start or 0, e.stop or 0) for e in sink.events if e.op is Op.SCORE)
    assert measured == RangeSet([(0, 7)])
