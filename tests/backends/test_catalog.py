"""The block catalog, and the table of resident blocks that it carries along: always what would be built afresh."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtape.backends.catalog import BlockCatalog, CatalogState, SegmentKind
from kvtape.planner import table as table_module
from kvtape.planner.blocks import CacheClass
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.plan import StreamPolicy, plan_hot_set
from kvtape.planner.ranges import RangeSet
from kvtape.planner.table import BlockTable
from support.counted_numpy import CountedNumpy

KINDS = (SegmentKind("user", CacheClass.VOLATILE), SegmentKind("repo_map", CacheClass.REPO_MAP))
COLUMNS = ("ids", "starts", "stops", "last_used", "ranks", "own", "scores")


class CatalogMachine(RuleBasedStateMachine):
    """Blocks come, grow, split and go, and so do the ranges that are resident; the table is asked now and then."""

    @initialize(block=st.sampled_from([1, 3, 8]), n=st.integers(0, 60))
    def start(self, block: int, n: int) -> None:
        self.catalog = BlockCatalog(block)
        self.resident = RangeSet()
        self.saved: list[tuple[CatalogState, RangeSet]] = []
        self.clock = 0
        if n:
            self.extend(n, KINDS[0], True)

    @rule(n=st.integers(1, 12), kind=st.sampled_from(KINDS), new=st.booleans())
    def extend(self, n: int, kind: SegmentKind, new: bool) -> None:
        start = self.catalog.tape_length
        # What is not resident at the tape's end is no part of what grows.
        new = new or (start > 0 and start - 1 not in self.resident)
        self.catalog.extend(n, kind, new_segment=new, clock=self.clock)
        self.resident |= RangeSet([(start, start + n)])

    @rule(start=st.integers(0, 80), n=st.integers(1, 20))
    def evict(self, start: int, n: int) -> None:
        gone = self.resident & RangeSet([(start, start + n)])
        self.catalog.split(gone.as_pairs())
        self.resident -= gone

    @rule(start=st.integers(0, 80), n=st.integers(1, 20))
    def come_back(self, start: int, n: int) -> None:
        back = (
            RangeSet([(start, min(start + n, self.catalog.tape_length))]) if start < self.catalog.tape_length else None
        )
        if back is not None:
            whole = [(b.start, b.stop) for r in back for b in self.catalog.inside(r.start, r.stop)]
            self.resident |= RangeSet(whole)

    @rule(at=st.integers(0, 80))
    def truncate(self, at: int) -> None:
        if at <= self.catalog.tape_length:
            self.catalog.truncate(at)
            self.resident &= RangeSet([(0, at)])

    @rule(start=st.integers(0, 80), n=st.integers(1, 30), retrieved=st.booleans())
    def touch(self, start: int, n: int, retrieved: bool) -> None:
        self.clock += 1
        self.catalog.touch(start, start + n, self.clock, retrieved=retrieved)
        self.catalog.forget_retrieved(start + n, start + 2 * n)

    @rule()
    def save(self) -> None:
        self.saved.append((self.catalog.copy_blocks(), self.resident))

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 9))
    def restore(self, which: int) -> None:
        blocks, self.resident = self.saved[which % len(self.saved)]
        self.catalog.restore_blocks(blocks)

    @rule(by_score=st.booleans())
    def ask(self, by_score: bool) -> None:
        table = self.catalog.resident_table(self.resident)
        fresh = BlockTable(self.catalog.resident(self.resident))
        assert table.blocks == fresh.blocks
        for name in COLUMNS:
            np.testing.assert_array_equal(getattr(table, name), getattr(fresh, name), err_msg=name)
        np.testing.assert_array_equal(table.order(by_score), fresh.order(by_score))

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "catalog"):
            self.catalog.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "catalog"):
            self.ask(False)


TestCatalogMachine = CatalogMachine.TestCase


def test_what_changed_while_it_was_out_of_the_cache_does_not_come_into_the_table() -> None:
    catalog, resident = BlockCatalog(8), RangeSet([(0, 320)])
    catalog.extend(320, KINDS[0], new_segment=True, clock=0)
    catalog.resident_table(resident)
    catalog.split([(12, 20)])
    resident -= RangeSet([(12, 20)])
    catalog.touch(12, 20, 1)
    spans = [(b.start, b.stop) for b in catalog.resident_table(resident).blocks]
    assert spans == [(0, 8), (8, 12), (20, 24), *((i, i + 8) for i in range(24, 320, 8))]
    resident |= RangeSet([(16, 20)])
    assert [(b.start, b.last_used) for b in catalog.resident_table(resident).blocks[1:4]] == [(8, 0), (16, 1), (20, 0)]


@pytest.mark.parametrize("stream", [True, False])
def test_a_token_more_sorts_and_reads_nothing_again(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a session does it, token by token: what is read of blocks and what is sorted does not grow with the cache."""
    read: list[int] = []
    reading = BlockTable._read

    def noted(self: BlockTable) -> None:
        read.append(len(self.blocks))
        reading(self)

    monkeypatch.setattr(BlockTable, "_read", noted)
    monkeypatch.setattr(table_module, "np", counted := CountedNumpy())
    n = 16_384
    catalog, tape = BlockCatalog(8), n
    catalog.extend(n, KINDS[0], new_segment=True, clock=0)
    resident = RangeSet([(0, n)])
    plan_hot_set(catalog.resident_table(resident), budget=n, capabilities=Capabilities(remove_middle=True))
    plan_hot_set(catalog.resident_table(resident), budget=n // 2, capabilities=Capabilities(remove_middle=True))
    read.clear()
    counted.sizes.clear()
    evictions = 0
    for _ in range(40):
        catalog.extend(1, KINDS[0], new_segment=False, clock=1)
        tape += 1
        resident |= RangeSet([(tape - 1, tape)])
        plan = plan_hot_set(
            catalog.resident_table(resident),
            budget=n,
            recent=1,
            stream=StreamPolicy(4, n - 5) if stream else None,
            split=stream,
            capabilities=Capabilities(remove_middle=True),
        )
        gone = [(r.start, r.stop) for r in plan.evict]
        evictions += len(gone)
        catalog.split(gone)
        resident -= RangeSet(gone)
    assert evictions >= 5
    assert max(read) <= 4
    assert max(counted.sizes, default=0) <= 4
