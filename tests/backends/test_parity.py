"""I3: plans are carried out on every backend through what it reports, or are a stated no-op. Same scenarios, same
assertions; what differs is asked of the session's capabilities, never of the backend's name."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

from kvtape.backends.errors import Cancelled, ContextOverflow, UnsupportedOperation
from kvtape.planner.blocks import PromptSegment
from kvtape.planner.events import Event, Op, Way
from kvtape.planner.specs import parse_policy
from kvtape.planner.ways import available_ways
from kvtape.replay.invariants import plan_findings
from support.parity import BACKENDS, TOKENS, Played, capabilities_of, open_session, said

pytestmark = [pytest.mark.contract("I3"), pytest.mark.timeout(120)]
every_backend = pytest.mark.parametrize("name", BACKENDS)

STREAM = "stream:sink=4,recent=60,block=16"
POLICIES = (
    STREAM,
    f"{STREAM},positions=gap",
    f"{STREAM},hole=refill",
    f"{STREAM},every=16",
    "class:budget=160,block=16",
    "class:budget=160,block=16,hole=forget",
    "h2o:budget=160,recent=32,block=16",
    "snapkv:budget=160,window=16,block=16",
    "random:budget=160,block=16,seed=3",
)


def evicts(played: Played) -> list[Event]:
    return [e for e in played.sink.events if e.op is Op.EVICT]


@every_backend
@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_chat_is_planned_and_every_plan_is_carried_out(name: str, policy: str) -> None:
    """With a way: it goes through, within the context, by the first way that is there. Without: a stated no-op, then a
    typed overflow that changes nothing more."""
    played = open_session(name, policy)
    can, session = played.can, played.session
    ways = parse_policy(policy).ways(can, True)
    with session:
        if not ways:
            with pytest.raises(ContextOverflow, match="nothing can be evicted here"):
                session.ensure_prefix(TOKENS[:400])
            assert evicts(played) == []
            assert all(json.loads(p.evict) == [] for p in played.sink.plans)
            played.check()
            return
        session.ensure_prefix(TOKENS[:400])
        played.check()
        said(session, 90, 1)
        played.check()
        session.ensure_prefix([*session.tape, *TOKENS[400:430]])
        played.check()
        session.ensure_prefix([*session.tape[:300], *TOKENS[500:560]])
        said(session, 40, 2)
        played.check()
        assert evicts(played)
        assert {e.way for e in evicts(played)} == {ways[0]}
        assert max(e.resident_tokens or 0 for e in played.sink.events) <= session._parts.n_ctx
    assert played.sink.plans


def refuses_to_evict(name: str) -> None:
    """Where there is no way, an evict is refused by name and takes nothing."""
    played = open_session(name, "none")
    with played.session as session:
        session.ensure_prefix(TOKENS[:40])
        with pytest.raises(UnsupportedOperation, match="evict"):
            session.evict(8, 16)
        assert session.resident.as_pairs() == [(0, 40)]
        played.check()


@functools.cache
def kept_and_planned(name: str, policy: str) -> tuple[list[tuple[int, int]], list[str]]:
    """What is resident in the end, and what each plan kept."""
    played = open_session(name, f"{policy},hole=forget")
    with played.session as session:
        session.ensure_prefix(TOKENS[:500])
        said(session, 70, 4)
        session.ensure_prefix([*session.tape, *TOKENS[500:520]])
        return session.resident.as_pairs(), [p.keep for p in played.sink.plans]


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "toy"])
@pytest.mark.parametrize("policy", [STREAM, "class:budget=160,block=16", "h2o:budget=160,recent=32,block=16"])
def test_every_backend_keeps_the_same_tokens_for_the_same_plan_inputs(name: str, policy: str) -> None:
    """Where there is a way, whatever it is, plans and retained set are the toy's; it has no scores to rank by."""
    can = capabilities_of(name)
    if not available_ways(can, True):
        refuses_to_evict(name)
        return
    if can.attention_scores:
        policy = policy.replace("h2o", "class").replace(",recent=32", "")  # scores that the toy does not have
    assert kept_and_planned(name, policy) == kept_and_planned("toy", policy)


@every_backend
def test_sinks_recent_and_pinned_stay(name: str) -> None:
    if not available_ways(capabilities_of(name), True):
        refuses_to_evict(name)
        return
    played = open_session(name, STREAM)
    with played.session as session:
        prompt = [
            PromptSegment(kind="user", tokens=tuple(TOKENS[:60])),
            PromptSegment(kind="system", tokens=tuple(TOKENS[60:90])),
            PromptSegment(kind="user", tokens=tuple(TOKENS[90:500])),
        ]
        session.ensure_prefix(prompt)
        played.check()
        stay = [*range(4), *range(60, 90), *range(440, 500)]
        assert all(p in session.resident for p in stay)


@every_backend
def test_rebased_positions_are_contiguous_or_refused_by_name(name: str) -> None:
    policy = f"{STREAM},positions=rebased"
    can = capabilities_of(name)
    if not available_ways(can, True, "rebased"):
        with pytest.raises(UnsupportedOperation, match="positions=rebased"):
            open_session(name, policy)
        return
    played = open_session(name, policy)
    with played.session as session:
        session.ensure_prefix(TOKENS[:400])
        played.check()
        state = session._parts.state
        assert state.next_cache_position == state.resident_tokens
        expected = Way.REBASED if can.remove_middle and can.position_shift else Way.RECOMPUTE
        assert {e.way for e in evicts(played)} == {expected}


@every_backend
def test_a_hole_is_filled_again_by_what_there_is(name: str) -> None:
    """From the cold store, else computed again in place, else the reuse ends there and the rest is prefilled."""
    can = capabilities_of(name)
    if not available_ways(can, True):
        refuses_to_evict(name)
        return
    for cold in (512, 0):
        played = open_session(name, "none:block=16,hole=refill", cold=cold, allow_recompute=True)
        with played.session as session:
            session.ensure_prefix(TOKENS[:120])
            session.evict(32, 64)
            n = len(played.sink.events)
            status = session.ensure_prefix([*TOKENS[:120], 7])
            played.check()
            ops = [e.op for e in played.sink.events[n:] if e.op in (Op.ADMIT, Op.RECOMPUTE, Op.TRUNCATE)]
            store = cold > 0 and played.can.cold_store
            if store:
                expected = [Op.ADMIT]
            elif played.can.recompute_range and played.can.remove_middle:
                expected = [Op.RECOMPUTE]
            else:
                expected = [Op.TRUNCATE]
            assert sorted(set(ops)) == sorted(expected)
            assert session.resident.as_pairs() == [(0, 121)]
            assert status.forgotten == 0


@every_backend
def test_evicting_by_recompute_gives_the_same_set_at_its_own_cost(name: str) -> None:
    if not capabilities_of(name).recompute_range:
        with pytest.raises(UnsupportedOperation, match="evicting by recompute"):
            open_session(name, STREAM, evict_by="recompute")
        return
    native = available_ways(capabilities_of(name))
    kept = []
    for evict_by in ("recompute", *(["native"] if native else [])):
        played = open_session(name, STREAM, evict_by=evict_by)
        with played.session as session:
            session.ensure_prefix(TOKENS[:400])
            played.check()
            kept.append(session.resident.as_pairs())
        for e in evicts(played) if evict_by == "recompute" else ():
            assert (e.way, e.recomputed_tokens) == (Way.RECOMPUTE, e.resident_tokens)
    assert len({str(k) for k in kept}) == 1


@every_backend
@pytest.mark.parametrize("evict_by", ["native", "recompute"])
def test_a_cancel_under_a_plan_leaves_one_account(name: str, evict_by: str) -> None:
    """It came as the plan was carried out: undone, or done and the session closed; never a plan half told."""
    can = capabilities_of(name)
    if not available_ways(can, True):
        refuses_to_evict(name)
        return
    if evict_by == "recompute" and not can.recompute_range:
        with pytest.raises(UnsupportedOperation, match="recompute"):
            open_session(name, STREAM, evict_by=evict_by)
        return
    played = open_session(name, STREAM, evict_by=evict_by)
    session, backend = played.session, played.session._parts.backend
    for operation in ("evict", "rebuild"):
        setattr(backend, operation, cancelling(played, getattr(backend, operation)))
    with session:
        session.ensure_prefix(TOKENS[:200])
        with pytest.raises(Cancelled):
            session.prefill_suffix(TOKENS[200:400])
        if not session.ended:
            played.check()
            session.prefill_suffix(TOKENS[200:220])
            played.check()
    assert plan_findings(played.sink.events, {p.seq: p for p in played.sink.plans}) == []
    assert any(p.evict != "[]" for p in played.sink.plans)


def cancelling(played: Played, real: Callable[..., Any]) -> Callable[..., Any]:
    def first_cancelled(*arguments: Any) -> Any:
        played.session.cancel()
        return real(*arguments)

    return first_cancelled


@every_backend
def test_a_plan_that_only_the_struct_makes_possible_is_never_tried_without_it(name: str) -> None:
    """A flag that is switched off is obeyed: the plan finds no way, and the backend is not touched."""
    played = open_session(name, STREAM, cold=0)
    backend = played.session._parts.backend
    backend.capabilities = dataclasses.replace(
        backend.capabilities, remove_middle=False, position_shift=False, recompute_range=False
    )
    with played.session as session:
        with pytest.raises(ContextOverflow, match="nothing can be evicted here"):
            session.ensure_prefix(TOKENS[:400])
        assert any("stream_unsupported" in p.diagnostics for p in played.sink.plans)
        assert evicts(played) == []
        played.check()
