"""`plan_hot_set`: golden vectors, field cases, and properties over arbitrary blocks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.planner.blocks import Block, CacheClass, Flag
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.events import BlockRef, Way
from kvtape.planner.plan import (
    BadBudget,
    BadScore,
    BadSpan,
    InvalidBlock,
    OverlappingBlocks,
    Plan,
    PlanError,
    StreamPolicy,
    plan_hot_set,
)
from kvtape.planner.ranges import Range, RangeSet
from kvtape.planner.ways import available_ways
from kvtape.testing.strategies import block_lists

PINNED, MAP, VOLATILE = CacheClass.TASK_PINNED, CacheClass.REPO_MAP, CacheClass.VOLATILE
SURGERY = Capabilities(remove_middle=True, position_shift=True)
SCORED = replace(SURGERY, attention_scores=True)
NOTHING = Capabilities()


def tens(*classes: CacheClass) -> list[Block]:
    """Neighbouring 10-token blocks, ids 0, 1, ..."""
    return [Block(i, 10 * i, 10 * i + 10, "user", c) for i, c in enumerate(classes)]


def ones(n: int, **rest: Any) -> list[Block]:
    return [Block(i, i, i + 1, "user", VOLATILE, **rest) for i in range(n)]


def plan(blocks: list[Block], budget: int = 1, capabilities: Capabilities = SURGERY, **rest: Any) -> Plan:
    return plan_hot_set(blocks, budget=budget, capabilities=capabilities, **rest)


def evicted(found: Plan) -> list[int]:
    return [ref.block_id for ref in found.evict]


# -- golden ------------------------------------------------------------------------------------------------------


def test_class_path_keeps_the_pinned_block_and_overshoots() -> None:
    found = plan(tens(PINNED, VOLATILE, VOLATILE, VOLATILE), 15)
    assert found.keep == (Range(0, 10),)
    assert found.evict == (BlockRef(1, 10, 20), BlockRef(2, 20, 30), BlockRef(3, 30, 40))
    assert (found.total, found.hot, found.protected, found.overshoot_tokens) == (40, 10, 10, 5)
    assert not found.over_budget
    assert found.diagnostics == ()


def test_stream_path_evicts_the_whole_middle_and_says_over_budget() -> None:
    found = plan(tens(VOLATILE, VOLATILE, VOLATILE, VOLATILE), 5, stream=StreamPolicy(sink=10, recent=10))
    assert found.keep == (Range(0, 10), Range(30, 40))
    assert evicted(found) == [1, 2]
    assert (found.hot, found.protected, found.over_budget) == (20, 20, True)
    assert found.diagnostics == ("over_budget",)


def test_stream_evicts_though_the_budget_is_not_exceeded_and_keeps_task_pinned() -> None:
    found = plan(tens(VOLATILE, PINNED, MAP, VOLATILE, VOLATILE), 1000, stream=StreamPolicy(sink=1, recent=1))
    assert evicted(found) == [2, 3]
    assert not found.over_budget
    assert found.overshoot_tokens == 20


def test_a_disabled_stream_is_the_class_path() -> None:
    blocks = tens(VOLATILE, VOLATILE)
    off = StreamPolicy(sink=1, recent=1, enabled=False)
    assert plan(blocks, 15, stream=off) == plan(blocks, 15)


def test_class_order_is_class_then_recency_then_start() -> None:
    blocks = [
        Block(0, 0, 10, "repo_map", MAP, last_used=1),
        Block(1, 10, 20, "user", VOLATILE, last_used=5),
        Block(2, 20, 30, "user", VOLATILE, last_used=2),
        Block(3, 30, 40, "user", VOLATILE, last_used=2),
        Block(4, 40, 50, "repo_map", MAP, last_used=0),
    ]
    order = [2, 3, 1, 4, 0]
    for n, budget in enumerate((40, 30, 20, 10, 1), start=1):
        assert evicted(plan(blocks, budget)) == sorted(order[:n])


def test_lower_scores_go_first_within_a_class_only() -> None:
    blocks = [
        Block(0, 0, 10, "repo_map", MAP, score=0.0),
        Block(1, 10, 20, "user", VOLATILE, last_used=1, score=0.9),
        Block(2, 20, 30, "user", VOLATILE, last_used=9, score=0.1),
    ]
    assert evicted(plan(blocks, 20, SCORED)) == [2]
    assert evicted(plan(blocks, 10, SCORED)) == [1, 2]
    assert evicted(plan(blocks, 20, SURGERY)) == [1], "a session that takes no scores goes by recency"


def test_incomplete_scores_are_not_mixed_with_recency() -> None:
    blocks = [replace(b, score=s) for b, s in zip(ones(3), (5.0, None, 1.0), strict=True)]
    found = plan(blocks, 2, SCORED)
    assert evicted(found) == [0]
    assert found.diagnostics == ("scores_incomplete",)
    protected = [replace(blocks[1], flags=Flag.PINNED), blocks[0], blocks[2]]
    assert evicted(plan(protected, 2, SCORED)) == [2], "only candidates need a score"


def test_plain_spans_protect_straddling_blocks_whole() -> None:
    found = plan(tens(VOLATILE, VOLATILE, VOLATILE, VOLATILE), 1, sink=11, recent=1)
    assert evicted(found) == [2]
    assert found.protected == 30
    assert found.over_budget


def test_split_cuts_at_the_borders_and_keeps_the_id() -> None:
    blocks = [replace(b, token_hash=7) for b in tens(VOLATILE, VOLATILE, VOLATILE, VOLATILE)]
    found = plan(blocks, 17, stream=StreamPolicy(sink=4, recent=13), split=True)
    assert found.keep == (Range(0, 4), Range(27, 40))
    assert found.evict == (BlockRef(0, 4, 10), BlockRef(1, 10, 20), BlockRef(2, 20, 27))
    assert [(b.block_id, b.start, b.stop, b.token_hash) for b in found.kept_blocks] == [
        (0, 0, 4, None),
        (2, 27, 30, None),
        (3, 30, 40, 7),
    ]
    assert (found.hot, found.protected, found.over_budget) == (17, 17, False)


def test_split_can_take_the_middle_out_of_one_block() -> None:
    found = plan([Block(3, 0, 100, "user", VOLATILE)], 20, sink=4, recent=6, split=True)
    assert found.keep == (Range(0, 4), Range(94, 100))
    assert found.evict == (BlockRef(3, 4, 94),)
    assert found.overshoot_tokens == 10


def test_split_leaves_whole_what_stays_whole() -> None:
    blocks = [Block(0, 0, 10, "system", PINNED), Block(1, 10, 30, "user", VOLATILE)]
    for found in (
        plan(blocks, 30, sink=4, recent=5, split=True),
        plan(blocks, 5, NOTHING, stream=StreamPolicy(4, 5), split=True),
        plan(blocks, 5, stream=StreamPolicy(12, 18), split=True),
    ):
        assert found.kept_blocks == tuple(blocks)
        assert found.evict == ()


def test_the_wider_of_both_spans_holds_under_stream() -> None:
    found = plan(ones(20), 20, sink=2, recent=5, stream=StreamPolicy(sink=4, recent=1))
    assert found.keep == (Range(0, 4), Range(15, 20))


def test_the_marks_of_a_plan_do_not_stick() -> None:
    """The recent window moves on: what it covered in one plan can go in the next."""
    policy = StreamPolicy(sink=1, recent=2)
    first = plan(ones(6), 6, stream=policy)
    later = [*first.kept_blocks, Block(9, 6, 7, "user", VOLATILE)]
    assert plan(later, 6, stream=policy).keep == (Range(0, 1), Range(5, 7))


def test_no_blocks_is_an_empty_plan() -> None:
    found = plan([], 4, sink=2, recent=2)
    assert (found.budget, found.total, found.hot, found.protected, found.over_budget) == (4, 0, 0, 0, False)
    assert (found.keep, found.evict, found.kept_blocks, found.diagnostics) == ((), (), (), ())


def test_holes_in_the_tape_are_no_blocks_and_recent_counts_positions() -> None:
    blocks = [
        Block(0, 0, 4, "user", VOLATILE),
        Block(1, 100, 104, "user", VOLATILE),
        Block(2, 107, 108, "user", VOLATILE),
    ]
    found = plan(blocks, 1, recent=5)
    assert found.keep == (Range(100, 104), Range(107, 108))


# -- what can be executed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capabilities", "allow", "positions", "ways"),
    [
        (NOTHING, True, "auto", ()),
        (Capabilities(position_shift=True, remove_tail=True, cold_store=True), True, "auto", ()),
        (Capabilities(remove_middle=True), False, "auto", (Way.GAP,)),
        (SURGERY, False, "auto", (Way.GAP, Way.REBASED)),
        (SURGERY, False, "gap", (Way.GAP,)),
        (SURGERY, False, "rebased", (Way.REBASED,)),
        (Capabilities(remove_middle=True), False, "rebased", ()),
        (Capabilities(recompute_range=True), False, "auto", ()),
        (Capabilities(recompute_range=True), True, "auto", (Way.RECOMPUTE,)),
        (Capabilities(recompute_range=True, remove_middle=True), True, "rebased", (Way.RECOMPUTE,)),
        (replace(SURGERY, recompute_range=True), True, "auto", (Way.GAP, Way.REBASED, Way.RECOMPUTE)),
    ],
)
def test_ways(capabilities: Capabilities, allow: bool, positions: Any, ways: tuple[Way, ...]) -> None:
    assert available_ways(capabilities, allow, positions) == ways
    found = plan(ones(9), 4, capabilities, recent=1, allow_recompute=allow, positions=positions)
    assert bool(found.evict) == bool(ways)


def test_whichever_way_runs_the_partition_is_the_same() -> None:
    blocks = tens(VOLATILE, MAP, VOLATILE, VOLATILE)
    recompute = Capabilities(recompute_range=True)
    for rest in ({"stream": StreamPolicy(3, 5), "split": True}, {"recent": 1}):
        plans = [
            plan(blocks, 12, Capabilities(remove_middle=True), **rest),
            plan(blocks, 12, SURGERY, **rest),
            plan(blocks, 12, recompute, allow_recompute=True, **rest),
        ]
        assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize(("budget", "over"), [(39, True), (40, False)])
@pytest.mark.parametrize(
    ("rest", "diagnostic"), [({"stream": StreamPolicy(1, 1)}, "stream_unsupported"), ({}, "evict_unsupported")]
)
def test_without_a_way_everything_stays(budget: int, over: bool, rest: dict[str, Any], diagnostic: str) -> None:
    found = plan(tens(VOLATILE, VOLATILE, VOLATILE, VOLATILE), budget, NOTHING, **rest)
    assert found.keep == (Range(0, 40),)
    assert found.evict == ()
    assert found.over_budget is over
    assert found.diagnostics == ((diagnostic, "over_budget") if over else (diagnostic,))


# -- field cases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [-5, 0, 1, 412, 511, 512, 10_000])
def test_f01_no_budget_takes_sinks_or_loses_count(budget: int) -> None:
    blocks = ones(512)
    if budget < 1:
        with pytest.raises(BadBudget):
            plan(blocks, budget, sink=100, recent=1)
        return
    found = plan(blocks, budget, sink=100, recent=1)
    assert RangeSet([(0, 100), (511, 512)]).issubset(RangeSet(found.keep))
    assert found.hot == max(101, min(budget, 512))
    assert found.hot + sum(r.stop - r.start for r in found.evict) == 512
    assert found.over_budget == (budget < 101)


def test_f14_a_tie_in_score_never_drops_a_protected_token() -> None:
    blocks = ones(16, score=1.0)
    found = plan(blocks, 8, SCORED, sink=4, recent=4)
    assert found.keep == (Range(0, 4), Range(12, 16))
    assert plan(list(reversed(blocks)), 8, SCORED, sink=4, recent=4) == found


@pytest.mark.parametrize("length", [1, 2, 3])
def test_f15_a_short_context_is_never_emptied(length: int) -> None:
    found = plan(ones(length), 1, recent=1)
    assert found.keep == (Range(length - 1, length),)
    with pytest.raises(BadBudget, match="empty cache"):
        plan(ones(length), 0, recent=1)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("capabilities", [SURGERY, SCORED])
def test_f15_a_score_that_is_no_number_names_its_block(score: float, capabilities: Capabilities) -> None:
    blocks = ones(3, score=0.5)
    blocks[1] = replace(blocks[1], flags=Flag.PINNED, score=score)
    with pytest.raises(BadScore, match=r"block 1 \[1, 2\)"):
        plan(blocks, 3, capabilities)


@pytest.mark.parametrize(
    ("error", "blocks", "rest"),
    [
        (BadBudget, [], {"budget": -1}),
        (BadBudget, [], {"budget": 0}),
        (BadBudget, [], {"budget": 0.4}),
        (BadBudget, [], {"budget": 7.0}),
        (BadBudget, [], {"budget": True}),
        (BadSpan, [], {"sink": -1}),
        (BadSpan, [], {"recent": -1}),
        (BadSpan, [], {"stream": StreamPolicy(sink=-1, recent=1), "sink": -1}),
        (InvalidBlock, [Block(0, 3, 3, "user", VOLATILE)], {}),
        (InvalidBlock, [Block(0, 5, 3, "user", VOLATILE)], {}),
        (InvalidBlock, [Block(0, -1, 3, "user", VOLATILE)], {}),
        (InvalidBlock, [Block(-1, 0, 3, "user", VOLATILE)], {}),
        (InvalidBlock, [Block(4, 0, 3, "user", VOLATILE), Block(4, 3, 5, "user", VOLATILE)], {}),
        (OverlappingBlocks, [Block(0, 0, 4, "user", VOLATILE), Block(1, 3, 5, "user", VOLATILE)], {}),
        (OverlappingBlocks, [Block(0, 0, 4, "user", VOLATILE), Block(1, 0, 4, "user", VOLATILE)], {}),
    ],
)
def test_inputs_that_cannot_be_planned(error: type[PlanError], blocks: list[Block], rest: dict[str, Any]) -> None:
    with pytest.raises(error) as caught:
        plan_hot_set(blocks, capabilities=SURGERY, **({"budget": 1} | rest))
    assert isinstance(caught.value, PlanError)


# -- properties ---------------------------------------------------------------------------------------------------


options = st.fixed_dictionaries(
    {
        "budget": st.integers(1, 80),
        "sink": st.integers(0, 20),
        "recent": st.integers(0, 20),
        "stream": st.none() | st.builds(StreamPolicy, st.integers(0, 20), st.integers(0, 20), st.booleans()),
        "split": st.booleans(),
        "capabilities": st.sampled_from([NOTHING, Capabilities(remove_middle=True), SCORED]),
    }
)


def positions(spans: Any) -> list[int]:
    return sorted(p for s in spans for p in range(s.start, s.stop))


def protected_positions(blocks: list[Block], rest: dict[str, Any]) -> set[int]:
    """The rule in plain words, token by token."""
    stream = rest["stream"]
    on = stream is not None and stream.enabled
    sink, recent = max(rest["sink"], stream.sink if on else 0), max(rest["recent"], stream.recent if on else 0)
    end = max((b.stop for b in blocks), default=0)
    spans = set(range(sink)) | set(range(max(0, end - recent), end))
    found: set[int] = set()
    for b in blocks:
        own = set(range(b.start, b.stop))
        if b.cache_class is PINNED or b.flags & (Flag.PINNED | Flag.SINK | Flag.RECENT):
            found |= own
        elif own & spans:
            found |= own & spans if rest["split"] else own
    return found


@given(st.booleans().flatmap(lambda s: block_lists(scored=s)), options)
def test_every_plan_is_an_exact_partition_that_spares_the_protected(blocks: list[Block], rest: dict[str, Any]) -> None:
    found = plan_hot_set(blocks, **rest)
    everything, kept, gone = positions(blocks), positions(found.keep), positions(found.evict)
    assert sorted(kept + gone) == everything
    assert positions(found.kept_blocks) == kept
    assert found.keep == RangeSet(found.keep).ranges
    assert list(found.evict) == sorted(found.evict, key=lambda r: r.start)
    assert [b.start for b in found.kept_blocks] == sorted(b.start for b in found.kept_blocks)
    spared = protected_positions(blocks, rest)
    assert not spared & set(gone)
    assert found.protected == len(spared)
    assert (found.total, found.hot) == (len(everything), len(kept))
    assert found.over_budget == (found.hot > found.budget) == ("over_budget" in found.diagnostics)
    by_id = {b.block_id: b for b in blocks}
    for ref in found.evict:
        assert by_id[ref.block_id].start <= ref.start < ref.stop <= by_id[ref.block_id].stop
    whole = {b.block_id: b for b in found.kept_blocks if b.n_tokens == by_id[b.block_id].n_tokens}
    assert all(by_id[i] is b for i, b in whole.items())
    if rest["capabilities"] is NOTHING:
        assert not gone
    elif rest["stream"] is not None and rest["stream"].enabled:
        assert set(kept) == spared
    else:
        assert found.over_budget <= (set(kept) == spared), "over budget only when nothing else may go"
        assert found.overshoot_tokens < max((b.n_tokens for b in blocks), default=1)


@given(st.booleans().flatmap(lambda s: block_lists(scored=s)), options, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(blocks: list[Block], rest: dict[str, Any], rng: random.Random) -> None:
    shuffled = list(blocks)
    rng.shuffle(shuffled)
    assert plan_hot_set(shuffled, **rest) == plan_hot_set(blocks, **rest) == plan_hot_set(iter(blocks), **rest)


@given(block_lists(), options)
def test_without_scores_a_scoring_session_goes_by_recency(blocks: list[Block], rest: dict[str, Any]) -> None:
    scored, plain = rest | {"capabilities": SCORED}, rest | {"capabilities": SURGERY}
    assert plan_hot_set(blocks, **scored) == plan_hot_set(blocks, **plain)


@given(block_lists(scored=True), options)
def test_scores_without_the_capability_change_nothing(blocks: list[Block], rest: dict[str, Any]) -> None:
    rest = rest | {"capabilities": SURGERY}
    bare = [replace(b, score=None) for b in blocks]
    assert plan_hot_set(blocks, **rest).evict == plan_hot_set(bare, **rest).evict


@given(st.booleans().flatmap(lambda s: block_lists(scored=s)), options)
def test_the_class_path_evicts_a_prefix_of_the_stated_order(blocks: list[Block], rest: dict[str, Any]) -> None:
    rest = rest | {"stream": None, "split": False, "capabilities": SCORED}
    gone = set(evicted(plan_hot_set(blocks, **rest)))
    spared = protected_positions(blocks, rest)
    ranked = sorted(
        (b for b in blocks if b.start not in spared),
        key=lambda b: (-b.cache_class.rank, b.score or 0.0, b.last_used, b.start),
    )
    hot, expected = sum(b.n_tokens for b in blocks), set()
    for b in ranked:
        if hot > rest["budget"]:
            hot -= b.n_tokens
            expected.add(b.block_id)
    assert gone == expected


@given(st.booleans().flatmap(lambda s: block_lists(scored=s)), options, st.integers(0, 30))
def test_a_larger_budget_never_keeps_less(blocks: list[Block], rest: dict[str, Any], more: int) -> None:
    smaller, larger = plan_hot_set(blocks, **rest), plan_hot_set(blocks, **(rest | {"budget": rest["budget"] + more}))
    assert RangeSet(smaller.keep).issubset(RangeSet(larger.keep))
