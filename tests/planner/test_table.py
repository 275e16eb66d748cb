"""`BlockTable`: what is carried along is what would be built afresh, and plans the same."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtape.planner import table as module
from kvtape.planner.blocks import Block, CacheClass
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.plan import BadScore, InvalidBlock, OverlappingBlocks, StreamPolicy, plan_hot_set
from kvtape.planner.table import BlockTable
from kvtape.testing.strategies import block_lists
from support.counted_numpy import CountedNumpy

VOLATILE, MAP = CacheClass.VOLATILE, CacheClass.REPO_MAP
CAN = Capabilities(remove_middle=True, attention_scores=True)
COLUMNS = ("ids", "starts", "stops", "last_used", "ranks", "own", "scores")

options = st.fixed_dictionaries(
    {
        "budget": st.integers(1, 80),
        "sink": st.integers(0, 20),
        "recent": st.integers(0, 20),
        "stream": st.none() | st.builds(StreamPolicy, st.integers(0, 20), st.integers(0, 20)),
        "split": st.booleans(),
    }
)


def same_columns(left: BlockTable, right: BlockTable) -> None:
    assert left.blocks == right.blocks
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)


@given(st.booleans().flatmap(lambda s: block_lists(scored=s, gaps=s)), options)
def test_a_table_plans_what_its_blocks_plan(blocks: list[Block], rest: dict[str, Any]) -> None:
    table = BlockTable(blocks)
    assert plan_hot_set(table, capabilities=CAN, **rest) == plan_hot_set(blocks, capabilities=CAN, **rest)
    assert plan_hot_set(table, capabilities=CAN, **rest) == plan_hot_set(blocks, capabilities=CAN, **rest), "again"


@given(block_lists(scored=True, gaps=True), st.booleans())
def test_the_order_in_plain_words(blocks: list[Block], by_score: bool) -> None:
    table = BlockTable(blocks)

    def rank(b: Block) -> tuple[float, ...]:
        score = (9.0 if b.score is None else b.score) if by_score else 0.0
        return (-b.cache_class.rank, score, b.last_used, b.start)

    assert [table.blocks[i] for i in table.order(by_score)] == sorted(blocks, key=rank)


class CarriedTable(RuleBasedStateMachine):
    """A table that lives through a session, beside the list of its blocks."""

    @initialize(blocks=block_lists(scored=True, gaps=True))
    def start(self, blocks: list[Block]) -> None:
        self.table = BlockTable(blocks)
        self.blocks = sorted(blocks, key=lambda b: b.start)
        self.next_id = len(blocks)

    @rule(
        picks=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 2), st.sampled_from([None, 0.0, 0.5])), max_size=3)
    )
    def fill_holes(self, picks: list[tuple[int, int, float | None]]) -> None:
        """Blocks that come back between others."""
        new: list[Block] = []
        for where, length, score in picks:
            stops, starts = [0, *(b.stop for b in self.blocks)], [*(b.start for b in self.blocks), self.table.end + 9]
            holes = [(a, b) for a, b in zip(stops, starts, strict=True) if b > a]
            start, stop = holes[where % len(holes)]
            if any(b.start < stop and start < b.stop for b in new):
                continue
            block = Block(self.next_id, start, min(stop, start + length), "user", MAP, last_used=where % 4, score=score)
            self.next_id += 1
            new.append(block)
        self.table.insert(new)
        self.blocks = sorted(self.blocks + new, key=lambda b: b.start)

    @rule(
        skip=st.integers(0, 2),
        length=st.integers(1, 9),
        cache_class=st.sampled_from(list(CacheClass)),
        used=st.integers(0, 3),
        score=st.sampled_from([None, 0.0, 0.5, 1.0]),
    )
    def append(self, skip: int, length: int, cache_class: CacheClass, used: int, score: float | None) -> None:
        at = self.table.end + skip
        block = Block(self.next_id, at, at + length, "user", cache_class, last_used=used, score=score)
        self.next_id += 1
        self.table.insert([block])
        self.blocks.append(block)

    @precondition(lambda self: self.blocks)
    @rule(used=st.integers(0, 3))
    def grow_the_last(self, used: int) -> None:
        last = self.blocks.pop()
        self.table.remove([last.block_id])
        grown = replace(last, stop=last.stop + 1, last_used=used)
        self.table.insert([grown])
        self.blocks.append(grown)

    @rule(which=st.sets(st.integers(0, 11)))
    def evict(self, which: set[int]) -> None:
        gone = [b for i, b in enumerate(self.blocks) if i in which]
        self.table.remove([b.block_id for b in gone])
        self.blocks = [b for b in self.blocks if b not in gone]

    @precondition(lambda self: self.blocks)
    @rule(which=st.integers(0, 20))
    def refuse(self, which: int) -> None:
        known = self.blocks[which % len(self.blocks)]
        end = self.table.end
        with pytest.raises(InvalidBlock):
            self.table.insert([Block(known.block_id, end, end + 1, "user", VOLATILE)])
        for start, stop in ((end - 1, end + 1), (known.start, known.stop), (max(0, known.start - 1), known.start + 1)):
            with pytest.raises(OverlappingBlocks):
                self.table.insert([Block(self.next_id, start, stop, "user", VOLATILE)])
        with pytest.raises(BadScore):
            self.table.insert([Block(self.next_id, end, end + 1, "user", VOLATILE, score=float("nan"))])
        with pytest.raises(InvalidBlock, match=f"no block with id {self.next_id}"):
            self.table.remove([known.block_id, self.next_id])

    @rule(by_score=st.booleans())
    def rank(self, by_score: bool) -> None:
        self.table.order(by_score)

    @invariant()
    def is_what_would_be_built_afresh(self) -> None:
        fresh = BlockTable(self.blocks)
        same_columns(self.table, fresh)
        for by_score, order in self.table._orders.items():
            np.testing.assert_array_equal(order, fresh.order(by_score))


TestCarriedTable = CarriedTable.TestCase


def test_a_plan_does_not_change_with_its_table() -> None:
    blocks = [Block(i, 10 * i, 10 * i + 10, "user", VOLATILE) for i in range(6)]
    table = BlockTable(blocks)
    found = plan_hot_set(table, budget=30, capabilities=CAN)
    table.remove([0, 1, 4])
    table.insert([Block(9, 60, 70, "user", VOLATILE)])
    assert found == plan_hot_set(blocks, budget=30, capabilities=CAN)
    assert found.kept_blocks == tuple(blocks[3:])


@pytest.mark.parametrize("wide", [{"block_id": 2**63}, {"stop": 2**63}, {"last_used": 2**64}])
def test_a_number_past_63_bits_is_refused(wide: dict[str, int]) -> None:
    with pytest.raises(InvalidBlock, match="past 63 bits"):
        BlockTable([replace(Block(0, 0, 4, "user", VOLATILE), **wide)])


def test_the_largest_numbers_are_taken() -> None:
    table = BlockTable([Block(2**63 - 1, 2**62, 2**63 - 1, "user", VOLATILE, last_used=-(2**63))])
    assert (table.ids[0], table.end) == (2**63 - 1, 2**63 - 1)


def many(n: int, scored: bool) -> list[Block]:
    draws = np.random.default_rng(1).random(n).tolist()
    return [
        Block(i, 4 * i, 4 * i + 4, "user", VOLATILE, last_used=i // 40, score=x if scored else None)
        for i, x in enumerate(draws)
    ]


@pytest.mark.parametrize("by_score", [False, True])
def test_one_block_more_sorts_nothing_again(by_score: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "np", counted := CountedNumpy())
    blocks = many(4_096, by_score)
    table = BlockTable(blocks)
    plan_hot_set(table, budget=8_000, recent=1, capabilities=CAN)
    assert sum(counted.sizes) <= 2 * len(blocks), "ranked once, when first planned"
    counted.sizes.clear()
    compared: list[int] = []
    key = BlockTable._key

    def noted(self: BlockTable, i: int, by: bool) -> tuple[float, ...]:
        compared.append(i)
        return key(self, i, by)

    monkeypatch.setattr(BlockTable, "_key", noted)
    new = Block(5_000, table.end, table.end + 4, "user", VOLATILE, last_used=7, score=0.5 if by_score else None)
    table.insert([new])
    table.remove([3])
    found = plan_hot_set(table, budget=8_000, recent=1, capabilities=CAN)
    assert [n for n in counted.sizes if n > 1] == []
    assert len(compared) <= np.log2(len(blocks)) + 2
    fresh = [*blocks[:3], *blocks[4:], new]
    assert found == plan_hot_set(fresh, budget=8_000, recent=1, capabilities=CAN)


@pytest.mark.parametrize("by_score", [False, True])
def test_a_plan_takes_as_many_steps_for_many_blocks_as_for_few(by_score: bool) -> None:
    """All that grows with the blocks is inside numpy: passes over arrays, and at most two sorts."""

    def steps(n: int) -> int:
        blocks, seen = many(n, by_score), 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal seen
            seen += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            plan_hot_set(blocks, budget=2 * n, recent=1, capabilities=CAN)
        finally:
            sys.setprofile(None)
        return seen

    assert steps(256) == steps(4_096)


@pytest.mark.parametrize(
    ("scores", "order"),
    [
        ([0.3, 0.1, 0.2], [1, 2, 0]),
        ([0.2, 0.1, 0.2], [1, 2, 0]),
        ([None, 0.1, None], [1, 2, 0]),
        ([None, 0.3, 0.1], [2, 1, 0]),
        ([0.0, 0.0, -0.0], [2, 1, 0]),
    ],
)
def test_ties_go_by_age_whether_or_not_there_are_some(scores: list[float | None], order: list[int]) -> None:
    blocks = [Block(i, i, i + 1, "user", VOLATILE, last_used=9 - i, score=s) for i, s in enumerate(scores)]
    assert BlockTable(blocks).order(by_score=True).tolist() == order
