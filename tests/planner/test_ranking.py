"""The order that explains a plan is the order that the plan follows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtape.planner.blocks import Block
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.ranking import ranking
from kvtape.planner.specs import PolicySpec
from kvtape.planner.table import BlockTable
from kvtape.testing.strategies import block_lists, capabilities, policies


@given(block_lists(scored=True, gaps=True), policies(), capabilities(), st.integers(1, 80), st.booleans())
def test_a_plan_evicts_the_head_of_its_ranking(
    blocks: list[Block], policy: PolicySpec, can: Capabilities, budget: int, recompute: bool
) -> None:
    table = BlockTable(blocks)
    plan = policy.plan(table, budget=budget, capabilities=can, allow_recompute=recompute)
    order = ranking(policy, table, budget=budget, capabilities=can, allow_recompute=recompute)
    ranked = [(table.blocks[i].block_id, int(order.free.starts[i]), int(order.free.stops[i])) for i in order.candidates]
    gone = set() if plan is None else {(b.block_id, b.start, b.stop) for b in plan.evict}
    if order.by == "all":
        assert gone == set(ranked)
    else:
        assert gone == set(ranked[: len(gone)])
    if order.by == "nothing":
        assert not ranked
