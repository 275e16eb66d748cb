"""What a log says of I1 to I3: nothing against a sound one, and each forged row by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import Cancelled, SessionFatal
from kvtape.backends.session import Session
from kvtape.planner.events import Event, Op, Way
from kvtape.planner.rows import PlanRow
from kvtape.planner.specs import parse_policy
from kvtape.replay.invariants import capability_findings, fatal_findings, plan_findings
from kvtape.testing.sink import ListSink
from support.toys import toy_backend


def recorded(*, fatal: bool = False) -> ListSink:
    """A session that plans, evicts, admits, snapshots, and ends in a fatal or in a close."""
    toy, sink = toy_backend(n_ctx=48, chunk=8, cold_budget_tokens=32), ListSink()
    policy = parse_policy("stream:sink=2,recent=9,block=4")
    session = Session(toy, policy, sink, ManualClock(), run_id="r", session_id="s")
    session.ensure_prefix([i % 60 for i in range(120)])
    session.decode(20)
    session.admit(session.cold_block_ids[-1])
    session.restore(session.snapshot())
    session.ensure_prefix([*session.tape, 4])
    session.compact()
    if fatal:
        toy.faults = {"decode"}
        with pytest.raises(SessionFatal):
            session.decode(1)
    session.close()
    return sink


def plans(sink: ListSink) -> dict[int, PlanRow]:
    return {p.seq: p for p in sink.plans}


def change(events: list[Event], op: Op, **columns: Any) -> tuple[list[Event], int]:
    """The last event of this op, changed, and its seq."""
    i = max(i for i, e in enumerate(events) if e.op is op)
    return [*events[:i], replace(events[i], **columns), *events[i + 1 :]], events[i].seq


@pytest.mark.parametrize("fatal", [False, True])
def test_a_sound_session_has_nothing_against_it(fatal: bool) -> None:
    sink = recorded(fatal=fatal)
    assert fatal_findings(sink.events) == []
    assert capability_findings(sink.sessions[0], sink.events) == []
    assert plan_findings(sink.events, plans(sink)) == []
    assert {Op.PLAN, Op.EVICT, Op.ADMIT, Op.SHIFT, Op.RESTORE} <= {e.op for e in sink.events}


@pytest.mark.parametrize(
    ("columns", "what"),
    [({"error_class": "bad_luck"}, "class 'bad_luck', which is none"), ({"reason": None}, "without a cause")],
)
def test_a_fatal_names_its_class_and_its_cause(columns: dict[str, Any], what: str) -> None:
    events, seq = change(recorded(fatal=True).events, Op.FATAL, **columns)
    (found,) = fatal_findings(events)
    assert (found.seq, what in found.what) == (seq, True)


def test_nothing_is_done_behind_a_fatal() -> None:
    events = recorded(fatal=True).events
    at = next(i for i, e in enumerate(events) if e.op is Op.FATAL)
    decode = next(e for e in events if e.op is Op.DECODE)
    (found,) = fatal_findings([*events[: at + 1], replace(decode, seq=events[at].seq + 1)])
    assert (found.seq, found.what) == (events[at].seq + 1, f"decode behind the fatal of seq {events[at].seq}")


@pytest.mark.parametrize(
    ("flag", "op"),
    [
        ("remove_middle", "evict"),
        ("cold_store", "evict"),
        ("cold_store", "admit"),
        ("position_shift", "shift"),
        ("snapshot_state", "snapshot"),
        ("snapshot_state", "restore"),
    ],
)
def test_nothing_is_executed_that_the_struct_rules_out(flag: str, op: str) -> None:
    sink = recorded()
    struct = json.loads(sink.sessions[0].capabilities or "{}")
    row = replace(sink.sessions[0], capabilities=json.dumps({**struct, flag: False}))
    assert f"{op} was executed, although {flag} is false" in {b.what for b in capability_findings(row, sink.events)}


def test_a_session_without_a_struct_claims_nothing() -> None:
    sink = recorded()
    assert capability_findings(replace(sink.sessions[0], capabilities="{}"), sink.events) == []


def test_a_plan_is_held_to_what_was_evicted_behind_it() -> None:
    sink = recorded()
    seq, plan = next((s, p) for s, p in plans(sink).items() if json.loads(p.evict))
    (block, start, stop) = json.loads(plan.evict)[0]
    for forged in ("[]", json.dumps([[block, start, stop - 1]])):
        (found, *_) = plan_findings(sink.events, plans(sink) | {seq: replace(plan, evict=forged)})
        assert found.seq == seq
        assert "was evicted behind it" in found.what
    (found,) = plan_findings(sink.events, {s: p for s, p in plans(sink).items() if s != seq})
    assert (found.seq, found.what) == (seq, "a plan event without its plan")
    silent = replace(plan, over_budget=True, diagnostics="[]")
    (found,) = plan_findings(sink.events, plans(sink) | {seq: silent})
    assert found.what == "over budget, and no diagnostic says why"


def test_a_plan_that_was_cut_short_may_have_done_less_and_nothing_else() -> None:
    sink = recorded()
    at = next(i for i, e in enumerate(sink.events) if e.op is Op.EVICT)
    cut = sink.events[:at]
    assert plan_findings(cut, plans(sink)) == []
    other = replace(sink.events[at], start=0, stop=1, way=Way.GAP)
    assert plan_findings([*cut, other], plans(sink)) != []


@pytest.mark.parametrize("computed", [0, 30])
def test_a_plan_that_was_cancelled_did_nothing_and_a_plan_that_was_refused_is_broken(computed: int) -> None:
    """With and without something that the cancel takes back."""
    toy, sink = toy_backend(n_ctx=48, chunk=8), ListSink()
    policy = parse_policy("stream:sink=2,recent=9,block=4")
    with Session(toy, policy, sink, ManualClock(), run_id="r", session_id="s", evict_by="recompute") as session:
        session.ensure_prefix([i % 60 for i in range(30)])
        rebuild = toy.rebuild

        def cancelled(*arguments: Any) -> Any:
            session.cancel()
            return rebuild(*arguments)

        toy.rebuild = cancelled  # type: ignore[method-assign]
        with pytest.raises(Cancelled):
            session.prefill_suffix([5] * computed) if computed else session.plan_now(12)
        toy.rebuild = rebuild  # type: ignore[method-assign]
        session.prefill_suffix([5, 6])
    taken_back = [Op.TRUNCATE] if computed else []
    behind = [Op.PLAN, *taken_back, Op.REFUSE, Op.PROMPT, Op.PREFILL, Op.CLOSE]
    assert [e.op for e in sink.events[-len(behind) :]] == behind
    assert plan_findings(sink.events, plans(sink)) == []
    refused, _ = change(sink.events, Op.REFUSE, error_class="UnsupportedOperation")
    other = [replace(e, reason="asked") if e.op is Op.TRUNCATE else e for e in refused]
    (found,) = plan_findings(other, plans(sink))
    assert "[] was evicted behind it" in found.what
