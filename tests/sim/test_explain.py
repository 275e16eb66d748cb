"""`kvtape.sim.explain`: the recorded plan comes out again from the log alone, on any session."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.backends.session import Session
from kvtape.planner.blocks import PromptSegment
from kvtape.planner.events import Event, Op
from kvtape.planner.ranges import RangeSet
from kvtape.planner.residency import ResidencyState, apply
from kvtape.planner.rows import BlockRow, PlanRow, ScoreRow, SessionRow
from kvtape.planner.specs import SpecError, parse_policy
from kvtape.sim.errors import WorkloadError
from kvtape.sim.explain.alternatives import alternative_of, usual_policies
from kvtape.sim.explain.decision import decision_of
from kvtape.sim.explain.explaining import explain_event
from kvtape.sim.explain.hindsight import hindsight
from kvtape.sim.explain.moment import moment_of, recorded_session
from support.explained import PLAYS, Step, play_steps, recorded

UNSCORED = (
    "stream:sink=4,recent=20,block=8",
    "stream:sink=3,recent=12,split=no,block=5,hole=refill",
    "class:budget=32,block=8",
    "class:budget=30,recent=6,block=4,every=5,split=yes",
    "random:budget=32,seed=3,block=8,grace=6",
)
SCORED = (
    "h2o:budget=32,recent=8,block=8",
    "h2o:budget=32,recent=8,block=8,norm=mean",
    "snapkv:budget=32,window=6,block=8",
    "tova:budget=32,recent=4,block=8",
)


def talk(session: Session) -> None:
    session.ensure_prefix(
        [PromptSegment(kind="system", tokens=(7, 8, 9)), PromptSegment(kind="user", tokens=tuple(range(40)))]
    )
    session.decode(14, stop_tokens=frozenset())


@settings(max_examples=60)
@given(
    PLAYS, st.sampled_from(UNSCORED), st.sampled_from(["native", "recompute"]), st.sampled_from([0, 32]), st.booleans()
)
def test_every_plan_comes_out_again(steps: list[Step], policy: str, evict_by: str, cold: int, defer: bool) -> None:
    session = recorded(play_steps(steps), policy, evict_by=evict_by, cold_tokens=cold, defer=defer)
    for seq in session.plans:
        assert decision_of(moment_of(session, seq)).rederived.verdict == "equal", (seq, policy)


@settings(max_examples=40)
@given(PLAYS, st.sampled_from(SCORED))
def test_every_scored_plan_comes_out_again_within_what_is_known(steps: list[Step], policy: str) -> None:
    session = recorded(play_steps(steps), policy, scores=True)
    for seq in session.plans:
        again = decision_of(moment_of(session, seq)).rederived
        assert again.verdict in ("equal", "within_bounds"), (seq, policy, again)


def test_scores_by_window_are_known_exactly_and_accumulated_means_within_bounds() -> None:
    def play(session: Session) -> None:
        session.ensure_prefix(list(range(44)))
        session.decode(12, stop_tokens=frozenset())

    exact = recorded(play, SCORED[2], scores=True)
    bounded = recorded(play, SCORED[1], scores=True)
    assert exact.plans
    assert bounded.plans
    for seq in exact.plans:
        assert decision_of(moment_of(exact, seq)).rederived.verdict == "equal"
    for seq in bounded.plans:
        moment = moment_of(bounded, seq)
        assert decision_of(moment).rederived.verdict == "within_bounds"
        assert all(low <= high for low, high in zip(moment.scores.low, moment.scores.high, strict=True) if low and high)


@pytest.mark.parametrize("policy", [UNSCORED[0], UNSCORED[2], SCORED[0], SCORED[2]])
def test_a_plan_that_was_changed_does_not_come_out_again(policy: str) -> None:
    session = recorded(talk, policy, scores=True)
    seq = min(session.plans)
    fates = decision_of(moment_of(session, seq)).blocks
    other = max((f for f in fates if f.fate == "kept"), key=lambda f: f.score_high or 0.0).block
    evict = json.dumps([[other.block_id, other.start, other.stop]])
    changed = {**session.plans, seq: dataclasses.replace(session.plans[seq], evict=evict)}
    again = decision_of(moment_of(dataclasses.replace(session, plans=changed), seq)).rederived
    assert again.verdict == "differs"
    assert again.why is not None
    assert "evicted" in again.why


def test_every_block_has_its_fate_and_its_reason() -> None:
    session = recorded(talk, "class:budget=32,sink=2,recent=6,block=8")
    seq = max(session.plans)
    moment = moment_of(session, seq)
    decision = decision_of(moment)
    assert [f.block for f in decision.blocks] == list(moment.blocks)
    assert sum(f.block.n_tokens for f in decision.blocks) == moment.plan.total_tokens == moment.state.resident_tokens
    assert {f.why for f in decision.blocks} >= {"class task_pinned", "recent", "ranked"}
    assert decision.ranked_by == "age"
    ranks = sorted(f.rank for f in decision.blocks if f.rank is not None)
    assert ranks == list(range(1, len(ranks) + 1))
    went = [f for f in decision.blocks if f.fate == "evicted"]
    assert sorted(f.rank or 0 for f in went) == list(range(1, len(went) + 1))
    assert decision.freed >= decision.need > decision.freed - max(f.block.n_tokens for f in went)


def test_another_policy_is_asked_with_the_same_blocks_and_scores() -> None:
    session = recorded(talk, SCORED[2], scores=True)
    moment = moment_of(session, max(session.plans))
    for text in (
        "class:budget=32,block=8",
        "class:budget=48",
        "stream:sink=4,recent=12",
        "random:budget=32,seed=5",
        SCORED[2],
    ):
        policy = parse_policy(text)
        found = alternative_of(moment, text)
        blocks = moment.scores.on(moment.blocks) if policy.score_request else list(moment.blocks)
        limit = moment.plan.limit_tokens if policy.budget is None else policy.budget
        budget = limit - moment.plan.incoming_tokens
        plan = policy.plan(blocks, budget=budget, capabilities=moment.capabilities, allow_recompute=True)
        due = moment.plan.total_tokens + moment.plan.incoming_tokens > limit
        assert found.due == due
        gone = RangeSet((b.start, b.stop) for b in plan.evict) if due and plan is not None else RangeSet()
        assert found.evict == gone
        recorded_gone = RangeSet((a, b) for _, a, b in json.loads(moment.plan.evict))
        assert found.evicts_only == gone - recorded_gone
        assert found.keeps_only == recorded_gone - gone
    assert alternative_of(moment, SCORED[2]).evicts_only == RangeSet()
    never = alternative_of(moment, "none")
    assert (never.due, never.kept_tokens) == (False, moment.plan.total_tokens)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("h2o:budget=32,recent=4", "accumulated attention"),
        ("snapkv:budget=32,window=3", "last 3 tokens"),
        ("snapkv:budget=32,window=6,pool=3", "pool=3"),
        ("snapkv:budget=32,queries=probe", "no probe attention"),
        ("stream:sink=4,recent=100", "needs a context"),
    ],
)
def test_what_the_log_has_not_measured_is_not_answered(text: str, why: str) -> None:
    session = recorded(talk, SCORED[2], scores=True)
    found = alternative_of(moment_of(session, max(session.plans)), text)
    assert why in (found.error or "")
    assert found.kept_tokens is None


def test_without_a_scorer_no_scored_policy_is_answered() -> None:
    session = recorded(talk, UNSCORED[0])
    moment = moment_of(session, max(session.plans))
    assert "took no scores" in (alternative_of(moment, "h2o:budget=32,recent=4").error or "")
    assert [text.partition(":")[0] for text in usual_policies(moment)] == ["none", "class"]


def union(sets: Iterable[RangeSet]) -> RangeSet:
    return RangeSet((r.start, r.stop) for s in sets for r in s)


def outcomes(play: Callable[[Session], None], policy: str, **more: Any) -> list[tuple[str, int | None]]:
    session = recorded(play, policy, **more)
    first = min(session.plans)
    gone = RangeSet((a, b) for _, a, b in json.loads(session.plans[first].evict))
    found = hindsight(session, first, gone)
    settled = [o for o in found if o.what != "forgotten"]
    assert sum(o.ranges.n_tokens for o in settled) <= gone.n_tokens
    for o in found:
        assert o.ranges.issubset(gone)
        if o.seq is not None:
            assert session.events[o.seq].op == EVENT_OF[o.what]
    return [(o.what, o.turns) for o in found]


EVENT_OF = {
    "admitted": Op.ADMIT,
    "recomputed": Op.RECOMPUTE,
    "restored": Op.RESTORE,
    "prefilled_again": Op.TRUNCATE,
    "forgotten": Op.PROMPT,
    "off_the_tape": Op.TRUNCATE,
}
LONG = [*range(45), 3, 1, 4, 1, 5]


def again(session: Session) -> None:
    session.ensure_prefix(LONG)
    session.ensure_prefix([*LONG, 7])
    session.ensure_prefix([*LONG, 7, 8])


def other(session: Session) -> None:
    session.ensure_prefix(LONG)
    session.ensure_prefix([9, 9])


def back(session: Session) -> None:
    session.ensure_prefix(LONG[:30])
    saved = session.snapshot()
    session.ensure_prefix(LONG)
    session.restore(saved)


@pytest.mark.parametrize(
    ("play", "policy", "cold", "expected"),
    [
        (again, "stream:sink=4,recent=20,block=8", 0, [("forgotten", 2)]),
        (again, "class:budget=40,block=8", 64, [("admitted", 0)]),
        (again, "class:budget=40,block=8", 0, [("recomputed", 0)]),
        (other, "stream:sink=4,recent=20,block=8", 0, [("off_the_tape", 0)]),
        (back, "stream:sink=4,recent=20,block=8", 0, [("restored", 0)]),
        (lambda s: s.ensure_prefix(LONG), "stream:sink=4,recent=20,block=8", 0, [("never_asked", 0)]),
    ],
)
def test_hindsight_says_what_became_of_what_went(
    play: Callable[[Session], None], policy: str, cold: int, expected: list[tuple[str, int]]
) -> None:
    assert outcomes(play, policy, cold_tokens=cold) == expected


def test_a_prefill_says_what_its_tokens_were_before() -> None:
    def play(session: Session) -> None:
        session.ensure_prefix(LONG)
        session.ensure_prefix([*LONG[:46], 9, 9, 9, 9, 9, 9])

    session = recorded(play, "stream:sink=4,recent=20,block=8", cold_tokens=0)
    seq = next(e.seq for e in session.events if e.op == Op.PREFILL and e.turn == 2)
    found = explain_event(session, seq).computed
    assert found is not None
    cut = next(e for e in session.events if e.op == Op.TRUNCATE)
    assert (found.cut_seq, found.cut_reason) == (cut.seq, "diverged")
    assert found.cut.as_pairs() == [(46, 50)]
    assert found.new.as_pairs() == [(50, 52)]
    first = explain_event(session, 2).computed
    assert first is not None
    assert first.new.as_pairs() == [(0, 8)]


def test_a_refill_names_the_plan_that_had_given_it_up() -> None:
    session = recorded(again, "class:budget=40,block=8", cold_tokens=0)
    seq = next(e.seq for e in session.events if e.op == Op.RECOMPUTE)
    found = explain_event(session, seq)
    assert found.computed is not None
    assert found.plan_seq is None
    (eviction,) = found.computed.evicted
    assert eviction.plan_seq == min(session.plans)
    assert session.events[eviction.seq].op == Op.EVICT


def test_an_evict_is_explained_by_its_plan_and_a_wish_by_none() -> None:
    def play(session: Session) -> None:
        session.ensure_prefix(LONG[:30])
        session.evict(4, 8)
        session.ensure_prefix([*LONG, *LONG])

    session = recorded(play, "stream:sink=4,recent=12,block=8")
    evicts = [e for e in session.events if e.op == Op.EVICT]
    assert explain_event(session, evicts[0].seq).plan_seq is None
    planned = explain_event(session, evicts[-1].seq)
    assert planned.plan_seq in session.plans
    assert planned.decision is not None
    with pytest.raises(WorkloadError, match="no event 999"):
        explain_event(session, 999)
    with pytest.raises(SpecError):
        explain_event(session, 0, ["lru:budget=3"])


@settings(max_examples=40)
@given(PLAYS, st.sampled_from(UNSCORED), st.sampled_from([0, 32]), st.booleans())
def test_every_token_that_went_has_one_outcome_that_the_fold_bears_out(
    steps: list[Step], policy: str, cold: int, defer: bool
) -> None:
    session = recorded(play_steps(steps), policy, cold_tokens=cold, defer=defer)
    states = [ResidencyState()]
    for event in session.events:
        states.append(apply(states[-1], event))
    for seq in session.plans:
        moment = moment_of(session, seq)
        gone = RangeSet(f.evicted for f in decision_of(moment).blocks if f.evicted is not None)
        found = hindsight(session, seq, gone)
        settled = [o for o in found if o.what != "forgotten"]
        assert sum(o.ranges.n_tokens for o in settled) == union(o.ranges for o in settled).n_tokens
        assert union(o.ranges for o in found) == gone
        for o in found:
            if o.seq is None:
                continue
            before, after = states[o.seq], states[o.seq + 1]
            assert not o.ranges & before.resident or o.what == "restored"
            if o.what in ("admitted", "recomputed", "restored"):
                assert o.ranges.issubset(after.resident)
            elif o.what in ("off_the_tape", "prefilled_again"):
                assert all(r.start >= after.tape_length for r in o.ranges)
            else:
                assert session.events[o.seq].start is not None
                assert all(r.stop <= before.tape_length for r in o.ranges)


@settings(max_examples=20)
@given(PLAYS, st.sampled_from(UNSCORED), st.sampled_from([0, 32]), st.booleans())
def test_every_computed_token_was_something_before(steps: list[Step], policy: str, cold: int, defer: bool) -> None:
    session = recorded(play_steps(steps), policy, cold_tokens=cold, defer=defer)
    for event in session.events:
        if event.op not in (Op.PREFILL, Op.RECOMPUTE, Op.ADMIT):
            assert explain_event(session, event.seq).computed is None
            continue
        found = explain_event(session, event.seq, ["none"])
        span = RangeSet([(event.start or 0, event.stop or 0)])
        if found.computed is None:
            assert event.op == Op.ADMIT
            assert union(e.ranges for e in found.evicted_by) == span
            continue
        parts = [found.computed.new, found.computed.cut, *(e.ranges for e in found.computed.evicted)]
        assert sum(p.n_tokens for p in parts) == span.n_tokens
        assert union(parts) == span
        for eviction in found.computed.evicted:
            evict = session.events[eviction.seq]
            assert evict.op == Op.EVICT
            assert ((evict.reason or "").startswith("plan:")) == (eviction.plan_seq is not None)


def test_what_comes_after_lost_events_is_not_explained() -> None:
    whole = recorded(talk, UNSCORED[0])

    class LossyLog:
        def session(self, run_id: str, session_id: str) -> SessionRow:
            return whole.row

        def events(self, run_id: str, session_id: str) -> list[Event]:
            gap = dataclasses.replace(whole.events[6], op=Op.LOST, n_tokens=3)
            return [*whole.events[:6], gap, *whole.events[7:]]

        def blocks(self, run_id: str, session_id: str) -> tuple[BlockRow, ...]:
            return whole.blocks

        def plans(self, run_id: str, session_id: str) -> Mapping[int, PlanRow]:
            return whole.plans

        def scores(self, run_id: str, session_id: str) -> tuple[ScoreRow, ...]:
            return whole.scores

    session = recorded_session(LossyLog(), "r", "s")
    assert len(session.events) == 6
    assert explain_event(session, 2).computed is not None
    with pytest.raises(WorkloadError, match="no event 7 that can be folded; its events are 0 to 5"):
        explain_event(session, 7)
