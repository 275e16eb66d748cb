"""The Session's own rules, on the toy backend (the real engines have their own files)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import (
    ContextOverflow,
    InputRejected,
    UnknownBlock,
    UnsupportedOperation,
    UsageError,
)
from kvtape.backends.session import Session
from kvtape.planner.blocks import MissingRanges, PromptSegment
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.events import Op, Placement, Way
from kvtape.planner.ranges import Range
from kvtape.planner.residency import fold
from kvtape.planner.specs import SpecError, parse_policy
from kvtape.testing.sink import ListSink
from kvtape.testing.toy import TOY_CAPABILITIES
from support.toys import ops, toy_backend, toy_session


def test_golden_divergence_reuses_three_of_six() -> None:
    session, _, sink = toy_session()
    session.ensure_prefix([1, 2, 3, 4, 5, 6])
    status = session.ensure_prefix([1, 2, 3, 24, 25, 26])
    assert (status.reused, status.prefilled, status.dropped, status.forgotten) == (3, 3, 3, 0)
    assert ops(sink) == ["open", "prompt", "prefill", "prompt", "truncate", "prefill"]


def test_identical_prompt_computes_one_token() -> None:
    session, _, _ = toy_session(n_ctx=128, chunk=128)
    prompt = [i % 60 for i in range(85)]
    session.ensure_prefix(prompt)
    status = session.ensure_prefix(prompt)
    assert (status.reused, status.prefilled) == (84, 1)


def test_identical_prompt_without_logits_computes_nothing_and_still_counts() -> None:
    session, _, sink = toy_session()
    session.ensure_prefix([1, 2, 3])
    status = session.ensure_prefix([1, 2, 3], need_logits=False)
    assert (status.reused, status.prefilled) == (3, 0)
    assert sink.events[-1].op is Op.PROMPT
    assert sink.events[-1].reused == 3


def test_prompt_longer_than_the_context_streams_and_keeps_sinks_and_recent() -> None:
    session, toy, sink = toy_session("stream:sink=4,recent=20", n_ctx=64)
    session.ensure_prefix([i % 60 for i in range(200)])
    assert session.resident.ranges[0].start == 0
    assert 199 in session.resident
    assert len(toy.rows) <= 64
    evicts = [e for e in sink.events if e.op is Op.EVICT]
    assert evicts
    assert all(e.start is not None and e.start >= 4 for e in evicts)
    assert all(e.way is Way.GAP for e in evicts)
    # Freed down to sink + recent in one go: what is left right after the last evict.
    assert evicts[-1].resident_tokens == 24


def test_none_overflow_names_both_numbers_and_changes_nothing() -> None:
    session, toy, sink = toy_session(n_ctx=32, chunk=32)
    session.ensure_prefix(list(range(10)))
    before = session.tape
    with pytest.raises(ContextOverflow, match="40 tokens do not fit a context of 32"):
        session.ensure_prefix(list(range(40)))
    assert session.tape == before
    assert len(toy.rows) == 10
    assert sink.events[-1].op is Op.REFUSE
    assert sink.events[-1].error_class == "ContextOverflow"
    session.ensure_prefix(list(range(12)))


def test_decode_slides_under_stream_and_stops_full_under_none() -> None:
    session, toy, _ = toy_session("stream:sink=2,recent=10", n_ctx=32)
    session.ensure_prefix(list(range(30)))
    assert len(session.decode(100).tokens) == 100
    assert len(toy.rows) <= 32
    session, toy, _ = toy_session(n_ctx=32, chunk=32)
    session.ensure_prefix(list(range(30)))
    result = session.decode(100)
    assert (len(result.tokens), result.stopped) == (2, "context_full")
    with pytest.raises(ContextOverflow):
        session.decode(1)


def test_decode_runs_close_at_32_tokens() -> None:
    session, _, sink = toy_session(n_ctx=256)
    session.ensure_prefix([1])
    session.decode(70)
    assert [e.n_tokens for e in sink.events if e.op is Op.DECODE] == [32, 32, 6]


def test_forget_runs_past_a_hole_and_counts_it() -> None:
    session, _, _ = toy_session("stream:sink=4,recent=20", n_ctx=64)
    prompt = [i % 60 for i in range(200)]
    session.ensure_prefix(prompt)
    resident = session.resident.n_tokens
    status = session.ensure_prefix([*prompt, 1, 2, 3])
    assert status.reused + status.forgotten + status.prefilled == 203
    assert (status.reused, status.prefilled) == (resident, 3)


def test_refill_admits_from_the_cold_store_then_recomputes() -> None:
    session, _, sink = toy_session("none:hole=refill", n_ctx=128, cold_budget_tokens=64, chunk=128)
    prompt = [i % 60 for i in range(100)]
    session.ensure_prefix(prompt)
    session.evict(32, 64)
    session.ensure_prefix([*prompt, 7])
    assert "admit" in ops(sink)
    session, _, sink = toy_session("none:hole=refill", n_ctx=128, chunk=128)
    session.ensure_prefix(prompt)
    session.evict(32, 64)
    status = session.ensure_prefix([*prompt, 7])
    assert "recompute" in ops(sink)
    assert (status.reused, status.forgotten, status.prefilled) == (100, 0, 1)


def test_refill_without_any_way_ends_the_run_at_the_hole() -> None:
    caps = dataclasses.replace(TOY_CAPABILITIES, recompute_range=False, cold_store=False)
    session, _, sink = toy_session("none:hole=refill", n_ctx=128, capabilities=caps, chunk=128)
    prompt = list(range(60))
    session.ensure_prefix(prompt)
    session.evict(32, 40)
    status = session.ensure_prefix([*prompt, 7])
    assert (status.reused, status.forgotten, status.prefilled) == (32, 0, 29)
    assert [e.reason for e in sink.events if e.op is Op.TRUNCATE] == ["hole"]


def test_refill_without_surgery_ends_the_run_at_the_hole_and_rebuilds_what_is_before_it() -> None:
    caps = Capabilities(recompute_range=True)
    toy, sink = toy_backend(n_ctx=64, capabilities=caps, chunk=64), ListSink()
    session = Session(
        toy,
        parse_policy("class:budget=40,block=4"),
        sink,
        ManualClock(),
        run_id="r",
        session_id="s",
        allow_recompute=True,
    )
    prompt = list(range(40))
    session.ensure_prefix(prompt)
    session.evict(8, 12)
    status = session.ensure_prefix([*prompt[:30], 50])
    assert (status.reused, status.forgotten, status.prefilled) == (8, 0, 23)
    assert [(e.way, e.reason) for e in sink.events if e.op is Op.TRUNCATE] == [(Way.RECOMPUTE, "hole")]


def test_golden_admit_in_place_and_appended() -> None:
    session, toy, _ = toy_session("none:hole=forget,block=2", n_ctx=32, cold_budget_tokens=16)
    session.ensure_prefix([1, 2, 3, 4, 5, 6])
    session.evict(2, 4)
    assert session.resident.as_pairs() == [(0, 2), (4, 6)]
    session.admit(session.cold_block_ids[0])
    assert [r.token for r in toy.rows] == [1, 2, 3, 4, 5, 6]
    session.evict(2, 4)
    session.admit(session.cold_block_ids[0], Placement.APPEND)
    assert [r.token for r in toy.rows] == [1, 2, 5, 6, 3, 4]


def test_admit_into_a_closed_place_opens_it_by_a_shift() -> None:
    session, toy, sink = toy_session(
        "stream:sink=1,recent=2,positions=rebased,block=2", n_ctx=32, cold_budget_tokens=16
    )
    session.ensure_prefix([1, 2, 3, 4, 5, 6])
    session.evict(2, 4)
    assert [r.cache for r in toy.rows] == [0, 1, 2, 3]
    session.admit(session.cold_block_ids[0])
    assert [(r.token, r.cache) for r in toy.rows] == [(t, t - 1) for t in range(1, 7)]
    assert [e.delta for e in sink.events if e.op is Op.SHIFT] == [-2, 2]


def test_recompute_way_rebuilds_in_rank_order() -> None:
    toy, sink = toy_backend(n_ctx=32), ListSink()
    policy = parse_policy("stream:sink=2,recent=10")
    session = Session(
        toy,
        policy,
        sink,
        ManualClock(),
        run_id="r",
        session_id="s",
        allow_recompute=True,
        evict_by="recompute",
    )
    session.ensure_prefix(list(range(40)))
    evict = next(e for e in sink.events if e.op is Op.EVICT)
    assert evict.way is Way.RECOMPUTE
    assert evict.recomputed_tokens == evict.resident_tokens
    assert [r.cache for r in toy.rows] == list(range(len(toy.rows)))


@pytest.mark.parametrize(
    ("evict_by", "expected"),
    [
        ("native", ["export", "export", "evict", "evict"]),
        ("recompute", ["export", "rebuild", "export", "rebuild"]),
    ],
)
def test_a_block_holds_the_rows_that_were_there_when_it_was_evicted(evict_by: str, expected: list[str]) -> None:
    """A rebuild computes the rows of the second run anew, so they are copied out after it."""
    toy = toy_backend(n_ctx=64, cold_budget_tokens=64, chunk=64)
    policy = parse_policy("class:budget=30,block=8,recent=4")
    session = Session(toy, policy, ListSink(), ManualClock(), run_id="r", session_id="s", evict_by=evict_by)
    prompt = [
        PromptSegment(kind="user", tokens=tuple(range(8))),
        PromptSegment(kind="system", tokens=tuple(range(8))),
        PromptSegment(kind="user", tokens=tuple(range(14))),
    ]
    session.ensure_prefix(prompt)
    toy.operations.clear()
    session.prefill_suffix(list(range(14)))
    assert [o for o in toy.operations if o != "prefill"] == expected


def test_pinned_segments_survive_streaming() -> None:
    session, _, _ = toy_session("stream:sink=0,recent=10", n_ctx=64)
    segments = [
        PromptSegment(kind="system", tokens=tuple(range(20))),
        PromptSegment(kind="user", tokens=tuple(i % 60 for i in range(150))),
    ]
    session.ensure_prefix(segments)
    assert all(p in session.resident for p in range(20))


def test_pinned_part_that_cannot_fit_is_refused_before_anything_runs() -> None:
    session, toy, _ = toy_session("stream:sink=0,recent=10", n_ctx=64)
    with pytest.raises(ContextOverflow, match="pinned"):
        session.ensure_prefix([PromptSegment(kind="system", tokens=tuple(i % 60 for i in range(60)))])
    assert not toy.rows


def test_without_a_way_a_stream_policy_keeps_everything_and_says_so() -> None:
    caps = dataclasses.replace(TOY_CAPABILITIES, remove_middle=False, recompute_range=False)
    session, _, sink = toy_session("stream:sink=2,recent=10", n_ctx=32, capabilities=caps)
    with pytest.raises(ContextOverflow, match="nothing can be evicted here"):
        session.ensure_prefix(list(range(40)))
    assert any("stream_unsupported" in p.diagnostics for p in sink.plans)


def test_cold_trim_follows_the_budget_and_is_an_event() -> None:
    session, _, sink = toy_session("none:block=4", n_ctx=64, cold_budget_tokens=8, chunk=64)
    session.ensure_prefix(list(range(40)))
    for start in (4, 12, 20):
        session.evict(start, start + 4)
    assert [e.start for e in sink.events if e.op is Op.TRIM] == [4]
    assert len(session.cold_block_ids) == 2


def test_block_larger_than_the_cold_budget_is_refused_with_an_event() -> None:
    session, _, sink = toy_session("none:block=16", n_ctx=64, cold_budget_tokens=8, chunk=64)
    session.ensure_prefix(list(range(40)))
    session.evict(16, 32)
    refused = [e for e in sink.events if e.op is Op.REFUSE]
    assert [e.error_class for e in refused] == ["ColdStoreTooSmall"]
    assert session.cold_block_ids == ()
    assert session.resident.as_pairs() == [(0, 16), (32, 40)]


def test_restore_brings_tape_and_rows_back() -> None:
    session, toy, _ = toy_session(n_ctx=64, chunk=64)
    session.ensure_prefix(list(range(20)))
    saved = session.snapshot()
    session.ensure_prefix([*range(10), 50, 51])
    session.restore(saved)
    assert session.tape == tuple(range(20))
    assert [r.token for r in toy.rows] == list(range(20))
    with pytest.raises(InputRejected, match="prefill at least one token"):
        session.decode(1)
    with pytest.raises(UnknownBlock, match="snapshot 7"):
        session.restore(7)


@pytest.mark.parametrize("bad", [[], [-1], [64], [1, 2, 10**9]])
def test_bad_tokens_are_refused_and_recorded(bad: list[int]) -> None:
    session, toy, sink = toy_session()
    with pytest.raises(InputRejected):
        session.ensure_prefix(bad)
    assert toy.operations == []
    assert sink.events[-1].op is Op.REFUSE


def test_context_too_small_for_the_policy() -> None:
    with pytest.raises(SpecError, match="needs a context of at least"):
        toy_session("stream:sink=4,recent=60", n_ctx=64)


def test_rebased_needs_a_shift() -> None:
    caps = dataclasses.replace(TOY_CAPABILITIES, position_shift=False)
    with pytest.raises(UnsupportedOperation, match="positions=rebased"):
        toy_session("stream:sink=1,recent=4,positions=rebased", capabilities=caps)


def test_positions_near_the_trained_context_are_compacted_once() -> None:
    session, toy, sink = toy_session("stream:sink=2,recent=10", n_ctx=32, n_ctx_train=64)
    session.ensure_prefix([i % 60 for i in range(200)])
    session.decode(100)
    assert max(r.cache for r in toy.rows) < 64
    assert {e.reason for e in sink.events if e.op is Op.SHIFT} == {"trained_context"}


def test_every_row_folds_and_the_counters_add_up() -> None:
    session, _, sink = toy_session("stream:sink=4,recent=20", n_ctx=64, cold_budget_tokens=64)
    prompt = [i % 60 for i in range(150)]
    session.ensure_prefix(prompt)
    session.decode(40)
    session.ensure_prefix([*prompt[:100], 1, 2, 3])
    session.close()
    state = fold(sink.events)
    assert state.closed
    for event in sink.events:
        if event.reused is not None:
            total = event.reused + (event.forgotten or 0) + (event.prefilled or 0)
            assert total == event.prompt_tokens


def test_pinned_block_in_two_places_of_the_cache_is_cut_before_it_is_evicted() -> None:
    """Found by the state machine: an appended admit let one block span two runs of the cache."""
    session, _, sink = toy_session("stream:sink=2,recent=9,block=4", n_ctx=48, cold_budget_tokens=8, chunk=8)
    session.ensure_prefix([0], need_logits=False)
    session.decode(29)
    session.ensure_prefix([*session.tape[:30], 0], need_logits=False)
    session.decode(30)
    session.admit(session.cold_block_ids[-1], Placement.APPEND)
    session.decode(21)
    assert fold(sink.events).fatal is None


def test_pinned_rebuild_lays_the_survivors_together_between_two_runs_of_one_plan() -> None:
    """Found by the state machine: after the first rebuild the second run stands elsewhere in the cache."""
    toy, sink = toy_backend(n_ctx=32, cold_budget_tokens=8, chunk=8), ListSink()
    policy = parse_policy("stream:sink=2,recent=9,block=4")
    session = Session(toy, policy, sink, ManualClock(), run_id="r", session_id="s", evict_by="recompute")
    session.prefill_suffix([0] * 6)
    session.decode(26)
    session.ensure_prefix([*session.tape, 0], need_logits=False)
    session.admit(session.cold_block_ids[-1], Placement.APPEND)
    session.decode(17)
    assert fold(sink.events).fatal is None


def test_a_pinned_suffix_counts_what_is_pinned_already() -> None:
    session, ledger, sink = toy_session("stream:sink=0,recent=10", n_ctx=64)
    session.ensure_prefix([PromptSegment(kind="system", tokens=tuple(range(40)))])
    before = len(sink.events)
    with pytest.raises(ContextOverflow, match="80 pinned tokens"):
        session.prefill_suffix([1] * 40, kind="system")
    assert ops(sink)[before:] == ["refuse"]
    assert len(ledger.rows) == 40


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("n", [30, 60])
def test_a_budget_holds_from_the_first_piece_on(n: int, every: int) -> None:
    session, ledger, _ = toy_session(f"class:budget=24,block=4,every={every}", n_ctx=64, chunk=64)
    session.ensure_prefix(list(range(n)))
    assert len(ledger.rows) <= 24 + every - 1


def test_a_decode_stops_for_plans_and_for_the_budget_only() -> None:
    session, _, sink = toy_session("class:budget=24,block=4,every=6", n_ctx=64, chunk=64)
    session.ensure_prefix(list(range(24)))
    session.decode(24, stop_tokens=frozenset())
    steps = [(e.op, e.n_tokens) for e in sink.events if e.op in (Op.PLAN, Op.DECODE)]
    # A plan frees a block of 4; two more tokens are owed before the next one may run.
    assert steps[:3] == [(Op.PLAN, 4), (Op.DECODE, 4), (Op.DECODE, 2)]
    assert [op for op, _ in steps].count(Op.PLAN) == 4
    assert min(n or 0 for op, n in steps if op is Op.DECODE) == 2


def test_the_last_resident_token_cannot_be_evicted() -> None:
    session, ledger, sink = toy_session()
    session.ensure_prefix(list(range(10)))
    for start in (0, 9):
        with pytest.raises(InputRejected, match="token 9 is the last resident one"):
            session.evict(start, 10)
    assert len(ledger.rows) == 10
    assert sink.events[-1].op is Op.REFUSE
    session.evict(0, 9)


def test_admits_stay_below_the_trained_context() -> None:
    session, ledger, _ = toy_session("none:block=4", n_ctx=64, chunk=64, cold_budget_tokens=64, n_ctx_train=42)
    session.ensure_prefix(list(range(40)))
    session.evict(4, 8)
    with pytest.raises(ContextOverflow, match="44 tokens do not fit a context of 42: compact first"):
        session.admit(session.cold_block_ids[0], Placement.APPEND)
    session.compact()
    session.admit(session.cold_block_ids[0], Placement.APPEND)
    assert max(r.cache for r in ledger.rows) == 39


def test_segments_that_were_not_tokenised_are_left_out_unless_they_have_to_be_there() -> None:
    session, _, sink = toy_session()
    user = PromptSegment(kind="user", tokens=(1, 2))
    session.ensure_prefix([PromptSegment(kind="diff"), user, PromptSegment(kind="diff", n_bytes=9)])
    assert session.tape == (1, 2)
    with pytest.raises(MissingRanges) as caught:
        session.ensure_prefix([user, PromptSegment(kind="tools", n_bytes=5, required=True)])
    assert [(b.start, b.stop) for b in caught.value.blocks] == [(0, 2)]
    assert sink.events[-1].error_class == "MissingRanges"


def test_bounds_must_be_where_the_tokens_lie() -> None:
    session, _, _ = toy_session()
    at_three = PromptSegment(kind="user", tokens=(7, 8), bounds=Range(3, 5))
    with pytest.raises(InputRejected, match="which begin at 2"):
        session.ensure_prefix([PromptSegment(kind="user", tokens=(1, 2)), at_three])
    session.ensure_prefix([PromptSegment(kind="user", tokens=(1, 2, 3)), at_three])
    assert session.tape == (1, 2, 3, 7, 8)


def test_evicting_by_recompute_needs_no_cold_store_and_is_the_only_way_told() -> None:
    policy = parse_policy("stream:sink=1,recent=4")
    ledger, sink = toy_backend(), ListSink()
    session = Session(ledger, policy, sink, ManualClock(), run_id="r", session_id="s", evict_by="recompute")
    assert session.explain().ways == ("recompute",)
    session.ensure_prefix([1] * 100)
    assert {e.way for e in sink.events if e.op is Op.EVICT} == {Way.RECOMPUTE}


@pytest.mark.parametrize(("able", "allow"), [(False, None), (True, False)])
def test_evicting_by_recompute_where_that_cannot_be_is_refused_at_open(able: bool, allow: bool | None) -> None:
    ledger = toy_backend(capabilities=dataclasses.replace(TOY_CAPABILITIES, recompute_range=able))
    policy, sink, clock = parse_policy("stream:sink=1,recent=4"), ListSink(), ManualClock()
    with pytest.raises(UnsupportedOperation, match="evicting by recompute"):
        Session(ledger, policy, sink, clock, run_id="r", session_id="s", allow_recompute=allow, evict_by="recompute")
    assert sink.events == []


def test_a_restore_tells_what_the_engine_has_back_beside_what_can_be_reused() -> None:
    session, _, sink = toy_session("none:hole=forget", n_ctx=64, chunk=64)
    session.ensure_prefix(list(range(20)))
    session.evict(4, 8)
    saved = session.snapshot()
    session.decode(5)
    session.restore(saved)
    restore = sink.events[-1]
    assert (restore.n_tokens, restore.resident_tokens) == (16, 16)
    status = session.ensure_prefix([*range(20), 9])
    assert (status.reused, status.forgotten, status.prefilled) == (16, 4, 1)


@pytest.mark.parametrize(
    "act",
    [
        lambda s: s.ensure_prefix("abc"),
        lambda s: s.ensure_prefix([1, 2, 9, None]),
        lambda s: s.ensure_prefix([1, 2, 9, 1.0]),
        lambda s: s.prefill_suffix([True]),
        lambda s: s.decode(None),
        lambda s: s.decode(1.5),
        lambda s: s.evict(0.0, 1),
        lambda s: s.evict("0", "1"),
        lambda s: s.set_policy("none"),
        lambda s: s.set_policy(parse_policy("stream:sink=4,recent=600")),
    ],
)
def test_bad_arguments_are_refused_and_change_nothing(act) -> None:
    """The type checker is not there at run time; nothing that a caller passes may poison the session."""
    session, ledger, sink = toy_session()
    session.ensure_prefix([1, 2, 3, 4])
    before, layout = list(ledger.operations), ledger.books()
    with pytest.raises((UsageError, SpecError)):
        act(session)
    assert ops(sink)[-1] == "refuse"
    assert (ledger.operations, ledger.books(), session.tape) == (before, layout, (1, 2, 3, 4))
    session.decode(1)


def test_a_prompt_may_be_an_array() -> None:
    session, _, sink = toy_session()
    session.ensure_prefix(np.array([1, 2, 3]))  # type: ignore[arg-type]
    session.prefill_suffix(np.array([4, 5], np.uint16))  # type: ignore[arg-type]
    assert session.tape == (1, 2, 3, 4, 5)
    assert {type(t) for tokens in sink.tokens.values() for t in tokens} == {int}
