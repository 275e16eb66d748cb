"""Scored, random and user policies: rules on hand-made blocks, and properties over arbitrary ones."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.planner.blocks import Block, CacheClass, Flag
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.events import Event, Op, Way
from kvtape.planner.grammar import SpecError
from kvtape.planner.plan import BadBudget, BadScore, BadSpan, Plan
from kvtape.planner.ranges import Range, RangeSet
from kvtape.planner.ranked import plan_random, plan_scored
from kvtape.planner.residency import ResidencyState, apply
from kvtape.planner.specs import parse_policy
from kvtape.planner.table import BlockTable
from kvtape.planner.user_policy import (
    KeepRejected,
    NoBlockIds,
    PolicyFailed,
    PolicyView,
    ProtectedDropped,
    UnknownBlock,
    plan_user,
)
from kvtape.testing.strategies import block_lists

PINNED, MAP, VOLATILE = CacheClass.TASK_PINNED, CacheClass.REPO_MAP, CacheClass.VOLATILE
CAN = Capabilities(remove_middle=True, attention_scores=True)
NO_SCORER = Capabilities(remove_middle=True)
SCORED = ("h2o:budget={},recent=2", "snapkv:budget={},window=2", "tova:budget={},recent=2")


def ones(scores: Iterable[float | None], **rest: Any) -> list[Block]:
    return [Block(i, i, i + 1, "user", VOLATILE, score=s, **rest) for i, s in enumerate(scores)]


def scored(blocks: list[Block], budget: int, **rest: Any) -> Plan:
    return plan_scored(blocks, budget=budget, **({"can_score": True, "can_evict": True} | rest))


def kept(found: Plan) -> list[int]:
    return [p for r in found.keep for p in range(r.start, r.stop)]


# -- scored -------------------------------------------------------------------------------------------------------


def test_the_lowest_scores_go_until_it_fits() -> None:
    found = scored(ones([5, 1, 4, 2, 0, 3, 9]), 4)
    assert kept(found) == [0, 2, 5, 6]
    assert (found.hot, found.over_budget, found.diagnostics) == (4, False, ())


def test_a_tie_goes_by_age_then_position() -> None:
    assert kept(scored(ones([1.0] * 6), 3)) == [3, 4, 5]
    old = ones([1.0] * 6)
    old[4] = replace(old[4], last_used=-1)
    assert kept(scored(old, 5)) == [0, 1, 2, 3, 5]


def test_class_comes_before_score() -> None:
    blocks = [replace(b, cache_class=MAP) if b.start == 0 else b for b in ones([0, 9, 8, 7])]
    assert kept(scored(blocks, 2)) == [0, 3], "the last token is protected, the map goes last"


def test_f14_protected_tokens_are_not_ranked() -> None:
    blocks = ones([1.0] * 16)
    assert kept(scored(blocks, 8, sink=4, recent=4)) == [0, 1, 2, 3, 12, 13, 14, 15]
    low = ones([0, 0, *[9.0] * 12, 0, 0])
    assert kept(scored(low, 5, sink=2, recent=2)) == [0, 1, 13, 14, 15]


def test_grace_goes_last_and_only_when_nothing_else_is_left() -> None:
    blocks = ones([9, 8, 7, 6, 0, 0, 0, 0])
    assert kept(scored(blocks, 4)) == [0, 1, 2, 7]
    assert kept(scored(blocks, 4, grace=4)) == [4, 5, 6, 7]
    assert kept(scored(blocks, 2, grace=4)) == [6, 7]
    assert kept(scored(blocks, 6, grace=4)) == [0, 1, 4, 5, 6, 7]


def test_f44_starvation_is_counted() -> None:
    """Sums of attention over a lifetime fall with the position: the young go, and the plan says so."""
    decaying = [1 / (1 + p) for p in range(64)]
    found = scored(ones(decaying), 16, recent=4)
    assert kept(found) == [*range(12), 60, 61, 62, 63]
    assert (found.starved, found.diagnostics) == (48, ("starved=48",))
    with_grace = scored(ones(decaying), 16, recent=4, grace=8)
    assert kept(with_grace) == [*range(8), *range(56, 64)]
    assert with_grace.starved == 0, "what is newest stays, so the old end is not all there is"
    assert scored(ones([1.0] * 64), 16, recent=4).starved == 0


def test_unscored_candidates_go_last() -> None:
    found = scored(ones([3, None, 2, 1, None, 0, 9]), 4)
    assert kept(found) == [0, 1, 4, 6]
    assert found.diagnostics == ("scores_incomplete", "starved=1")
    assert kept(scored(ones([3, None, 2, 1, None, 0, 9]), 2)) == [4, 6]


def test_split_cuts_at_the_borders_where_asked() -> None:
    blocks = [Block(i, 32 * i, 32 * i + 32, "user", VOLATILE, score=float(9 - i)) for i in range(4)]
    whole = scored(blocks, 70, sink=4, recent=8)
    cut = scored(blocks, 70, sink=4, recent=8, split=True)
    assert whole.keep == (Range(0, 32), Range(96, 128))
    assert cut.keep == (Range(0, 32), Range(120, 128)), "28 tokens of the first block rank highest"
    assert cut.evict[-1] == replace(cut.evict[-1], block_id=3, start=96, stop=120)


@pytest.mark.parametrize("rest", [{"can_score": False}, {}])
def test_without_scores_it_is_a_stream(rest: dict[str, Any]) -> None:
    found = scored(ones([None] * 20), 9, sink=2, recent=3, **rest)
    assert kept(found) == [0, 1, *range(13, 20)]
    assert found.diagnostics == ("scores_missing",)
    assert scored(ones([None] * 9), 9, sink=2, recent=3, **rest).diagnostics == ()


def test_without_a_way_everything_stays() -> None:
    for found in (
        scored(ones([1.0] * 9), 4, can_evict=False),
        plan_random(ones([1.0] * 9), budget=4, seed=1, can_evict=False),
        plan_user(ones([1.0] * 9), budget=4, target="m:f", function=lambda _: 1 / 0, can_evict=False),  # type: ignore[arg-type,return-value]
    ):
        assert kept(found) == list(range(9))
        assert found.diagnostics == ("evict_unsupported", "over_budget")


def test_what_cannot_be_planned() -> None:
    with pytest.raises(BadScore, match=r"block 1 \[1, 2\)"):
        scored(ones([0, float("nan"), 1]), 2)
    with pytest.raises(BadBudget):
        scored(ones([1, 2]), 0)
    with pytest.raises(BadSpan, match="grace -1"):
        scored(ones([1, 2, 3]), 2, grace=-1)
    with pytest.raises(BadSpan):
        scored(ones([1, 2, 3]), 2, sink=-1)


# -- properties ---------------------------------------------------------------------------------------------------

spans = st.fixed_dictionaries(
    {
        "sink": st.integers(0, 20),
        "recent": st.integers(1, 20),
        "grace": st.integers(0, 20),
        "split": st.booleans(),
    }
)
budgets = st.integers(1, 80)


@given(block_lists(scored=True), spans, budgets, st.booleans())
def test_no_scores_keeps_what_stream_keeps(
    blocks: list[Block], rest: dict[str, Any], budget: int, scorer: bool
) -> None:
    """With the same sink and recent = budget - sink, in specs and blocks alike."""
    sink, recent = rest["sink"], rest["recent"]
    budget = max(budget, sink + recent + 1)
    bare = [replace(b, score=None) for b in blocks] if scorer else blocks
    split = "yes" if rest["split"] else "no"
    stream = parse_policy(f"stream:sink={sink},recent={budget - sink}")
    expected = stream.plan(blocks, budget=budget, capabilities=CAN)
    assert expected is not None
    for text in (
        f"h2o:budget={budget},recent={recent},sink={sink},split={split},grace={rest['grace']}",
        f"snapkv:budget={budget},window={recent},sink={sink},split={split}",
        f"snapkv:budget={budget},queries=probe,recent={recent},sink={sink}",
        f"tova:budget={budget},sink={sink},recent={recent}",
    ):
        found = parse_policy(text).plan(bare, budget=budget, capabilities=CAN if scorer else NO_SCORER)
        assert found is not None
        assert (found.keep, found.evict) == (expected.keep, expected.evict), text


@given(block_lists(scored=True, gaps=True), spans, budgets)
def test_a_scored_plan_partitions_and_spares(blocks: list[Block], rest: dict[str, Any], budget: int) -> None:
    found = scored(blocks, budget, **rest)
    everything = RangeSet((b.start, b.stop) for b in blocks)
    gone = RangeSet((r.start, r.stop) for r in found.evict)
    assert RangeSet(found.keep) | gone == everything
    assert not RangeSet(found.keep) & gone
    assert found.hot + gone.n_tokens == found.total == everything.n_tokens
    end = max((b.stop for b in blocks), default=0)
    spared = RangeSet([(0, rest["sink"]), (max(0, end - rest["recent"]), end)])
    own = RangeSet((b.start, b.stop) for b in blocks if b.protected)
    assert not (spared | own) & gone
    assert found.hot <= budget or found.over_budget
    assert found.over_budget == ("over_budget" in found.diagnostics)


@given(block_lists(scored=True, gaps=True), spans, budgets, st.integers(0, 30), st.integers(0, 2**31 - 1))
def test_a_larger_budget_never_evicts_more(
    blocks: list[Block], rest: dict[str, Any], budget: int, more: int, seed: int
) -> None:
    for plan in (scored, lambda b, n, **r: plan_random(b, budget=n, seed=seed, can_evict=True, **r)):
        small, large = plan(blocks, budget, **rest), plan(blocks, budget + more, **rest)
        assert RangeSet(small.keep).issubset(RangeSet(large.keep))


@given(block_lists(scored=True, gaps=True), budgets, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(blocks: list[Block], budget: int, rng: random.Random) -> None:
    shuffled = list(blocks)
    rng.shuffle(shuffled)
    for text in (*SCORED, "random:budget={},seed=5,recent=2", f"{__name__}:newest,budget={{}},recent=2"):
        policy = parse_policy(text.format(budget + 3))
        for capabilities in (CAN, NO_SCORER):
            plans = [
                policy.plan(given_, budget=budget, capabilities=capabilities)
                for given_ in (blocks, shuffled, BlockTable(shuffled))
            ]
            assert plans[0] == plans[1] == plans[2]


FLAGS = ("remove_middle", "position_shift", "recompute_range")


@given(
    block_lists(scored=True, gaps=True),
    budgets,
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.booleans(),
    st.sampled_from(["auto", "gap", "rebased"]),
    st.sampled_from([*SCORED, "random:budget={},seed=5,recent=2", "class:budget={}", "stream:sink={},recent=2"]),
)
def test_taking_an_ability_away_never_evicts_more(
    blocks: list[Block], budget: int, has: list[bool], allow: bool, positions: str, text: str
) -> None:
    full = Capabilities(**dict(zip((*FLAGS, "attention_scores"), has, strict=True)))
    policy = parse_policy(f"{text.format(budget + 3)},positions={positions}")
    before = policy.plan(blocks, budget=budget, capabilities=full, allow_recompute=allow)
    assert before is not None
    for flag in FLAGS:
        after = policy.plan(blocks, budget=budget, capabilities=replace(full, **{flag: False}), allow_recompute=allow)
        assert after is not None
        assert RangeSet(before.keep).issubset(RangeSet(after.keep))


@given(
    block_lists(scored=True, gaps=True),
    budgets,
    st.sampled_from(list(Way)[:3]),
    st.sampled_from([*SCORED, "random:budget={},seed=5,recent=2", "class:budget={}", "stream:sink={},recent=2"]),
)
def test_a_plan_that_is_carried_out_leaves_what_it_keeps(blocks: list[Block], budget: int, way: Way, text: str) -> None:
    """The blocks are computed, the others of the tape are gone, the plan's evictions run in descending start."""
    found = parse_policy(text.format(budget + 3)).plan(blocks, budget=budget, capabilities=CAN)
    assert found is not None
    if not blocks:
        return
    end = max(b.stop for b in blocks)
    holes = RangeSet([(0, end)]) - RangeSet((b.start, b.stop) for b in blocks)
    state = ResidencyState()

    def feed(op: Op, **columns: Any) -> None:
        nonlocal state
        event = Event(run_id="r", session_id="s", seq=state.next_seq, at_ns=0, op=op, turn=0, generation=0, **columns)
        state = apply(state, event)

    feed(Op.OPEN, n_tokens=end)
    feed(Op.PREFILL, start=0, stop=end, cache_start=0)
    for hole in holes:
        feed(Op.EVICT, start=hole.start, stop=hole.stop, way=Way.GAP)
    for ref in reversed(found.evict):
        feed(Op.EVICT, start=ref.start, stop=ref.stop, way=way, blocks=(ref,), cold=True)
    assert state.resident == RangeSet(found.keep)
    assert state.resident_tokens == found.hot
    assert state.cold_ranges.n_tokens == found.total - found.hot


@given(st.permutations(range(12)), st.integers(3, 12))
def test_scored_one_token_blocks_are_a_top_k(order: list[int], budget: int) -> None:
    found = scored(ones(map(float, order)), budget, sink=1)
    best = sorted(range(1, 11), key=lambda p: -order[p])[: budget - 2]
    assert kept(found) == sorted([0, 11, *best])


# -- random -------------------------------------------------------------------------------------------------------


def test_a_seed_draws_the_same_and_another_does_not() -> None:
    def draw(seed: int) -> list[int]:
        return kept(plan_random(ones([None] * 200), budget=60, sink=2, seed=seed, can_evict=True))

    assert draw(1) == draw(1)
    assert len({tuple(draw(seed)) for seed in range(20)}) == 20
    assert all({0, 1, 199} <= set(draw(seed)) for seed in range(20))


def test_the_draw_is_even() -> None:
    """Over many seeds each candidate stays as often as any other: 20 of 40 here."""
    stays = [0] * 41
    for seed in range(2000):
        for p in kept(plan_random(ones([None] * 41), budget=21, seed=seed, can_evict=True)):
            stays[p] += 1
    assert stays[40] == 2000
    # Standard deviation 22; five of them.
    assert all(abs(n - 1000) < 112 for n in stays[:40])


def test_a_block_draws_once() -> None:
    """What a smaller budget keeps is among what a larger one keeps, also after new tokens came."""
    first = plan_random(ones([None] * 50), budget=20, seed=3, can_evict=True)
    later = plan_random(ones([None] * 60), budget=20, seed=3, can_evict=True)
    assert {p for p in kept(later) if p < 49} <= set(kept(first))


# -- a user's function --------------------------------------------------------------------------------------------


def newest(view: PolicyView) -> list[int]:
    """The newest candidates that fit."""
    keep, room = list(view.protected), view.budget - view.protected_tokens
    for block in reversed(view.candidates):
        room -= block.n_tokens
        if room < 0:
            break
        keep.append(block.block_id)
    return keep


def by_score(view: PolicyView) -> Iterable[int]:
    yield from view.protected
    yield from (b.block_id for b in view.candidates if b.score is not None and b.score > 0.5)


def user(function: Any, blocks: list[Block] | None = None, budget: int = 4, **rest: Any) -> Plan:
    blocks = ones([0.2, 0.9, 0.4, 0.8, 0.1, 0.3, 0.7, 0.6]) if blocks is None else blocks
    return plan_user(blocks, budget=budget, target="mine:f", function=function, can_evict=True, **rest)


def test_a_function_decides() -> None:
    assert kept(user(newest, sink=1)) == [0, 5, 6, 7]
    found = user(by_score)
    assert kept(found) == [1, 3, 6, 7]
    assert (found.protected, found.overshoot_tokens, found.over_budget) == (1, 0, False)
    everything = user(lambda view: [b.block_id for b in view.blocks])
    assert everything.diagnostics == ("over_budget",)
    assert kept(user(lambda view: view.protected)) == [7]


def test_a_view_says_what_may_go() -> None:
    blocks = [replace(b, flags=Flag.PINNED) if b.start == 3 else b for b in ones([None] * 6)]
    seen: list[PolicyView] = []

    def look(view: PolicyView) -> Iterable[int]:
        seen.append(view)
        return view.protected

    user(look, list(reversed(blocks)), sink=1, recent=2)
    (view,) = seen
    assert view.blocks == tuple(blocks)
    assert view.protected == {0, 3, 4, 5}
    assert [b.start for b in view.candidates] == [1, 2]
    assert (view.total, view.protected_tokens, view.budget) == (6, 4, 4)
    with pytest.raises(AttributeError):
        view.budget = 9  # type: ignore[misc]


def broken_generator(view: PolicyView) -> Iterable[int]:
    yield from view.protected
    raise KeyError("later")


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda _: None, NoBlockIds, "policy mine:f: answered None; return the ids of the blocks to keep"),
        (lambda view: view.blocks, NoBlockIds, "policy mine:f: answered Block("),
        (lambda _: [True, 7], NoBlockIds, "policy mine:f: answered True; return the ids"),
        (lambda _: [7.0], NoBlockIds, "policy mine:f: answered 7.0; return the ids"),
        (lambda _: "07", NoBlockIds, "policy mine:f: answered '0'"),
        (lambda _: [7, 8], UnknownBlock, "policy mine:f: keeps blocks 8, which are not resident"),
        (lambda _: [7, 2**70], UnknownBlock, f"policy mine:f: keeps blocks {2**70}, which"),
        (lambda _: [7, *range(-9, 0)], UnknownBlock, "policy mine:f: keeps blocks -9, -8, -7, -6, -5, ..., which"),
        (lambda _: [7, 1, 1], UnknownBlock, "policy mine:f: names a block twice"),
        (lambda _: [], ProtectedDropped, "policy mine:f: drops blocks 7, which are protected; always add"),
        (lambda _: [7, 1 // 0], PolicyFailed, "policy mine:f: ZeroDivisionError: integer division"),
        (lambda _: sys.exit(7), PolicyFailed, "policy mine:f: SystemExit: 7"),
        (broken_generator, PolicyFailed, "policy mine:f: KeyError: 'later'"),
    ],
)
def test_nonsense_is_named(function: Any, error: type[KeepRejected], message: str) -> None:
    with pytest.raises(error) as caught:
        user(function)
    assert str(caught.value).startswith(message)
    assert caught.value.target == "mine:f"


def test_a_module_that_cannot_be_imported_is_a_bad_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_policy.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        SpecError, match=r"importing 'broken_policy' failed: ZeroDivisionError: division by zero; mend it"
    ):
        parse_policy("broken_policy:keep,budget=4")


def test_a_spec_names_a_function() -> None:
    policy = parse_policy(f"{__name__}:newest,budget=4,sink=1")
    found = policy.plan(ones([None] * 8), budget=4, capabilities=NO_SCORER)
    assert found is not None
    assert kept(found) == [0, 5, 6, 7]
    assert policy.evicts
    assert policy.hole == "forget"
