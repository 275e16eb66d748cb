"""`plan_hot_set`: the one pure decision about which resident blocks stay.

tape      0        sink                     end-recent     end
          |--SINK---|------candidates------------|--RECENT--|
stream    keep       evict all that is unprotected    keep
class     keep       evict in order until it fits     keep
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvtape.planner.blocks import Block
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.outcome import Diagnostic, Plan, make_plan
from kvtape.planner.plan_errors import BadBudget, BadScore, BadSpan, InvalidBlock, OverlappingBlocks, PlanError
from kvtape.planner.spans import Free, free_parts
from kvtape.planner.table import BlockTable, Ints
from kvtape.planner.ways import Positions, available_ways

__all__ = [
    "BadBudget",
    "BadScore",
    "BadSpan",
    "Diagnostic",
    "InvalidBlock",
    "OverlappingBlocks",
    "Plan",
    "PlanError",
    "StreamPolicy",
    "class_candidates",
    "first_until",
    "plan_hot_set",
    "prepared",
]


@dataclass(frozen=True, slots=True)
class StreamPolicy:
    """Keep the first `sink` and the last `recent` tape positions, whatever the budget. Spans in tokens."""

    sink: int
    recent: int
    enabled: bool = True


def plan_hot_set(
    blocks: Iterable[Block] | BlockTable,
    *,
    budget: int,
    sink: int = 0,
    recent: int = 0,
    stream: StreamPolicy | None = None,
    capabilities: Capabilities,
    allow_recompute: bool = False,
    split: bool = False,
    positions: Positions = "auto",
) -> Plan:
    """Which blocks stay, of those resident now, in any order; a `BlockTable` saves reading and sorting them again.

    Blocks overlapping `[0, sink)` or `[end - recent, end)` (end: the largest stop; with a stream policy the wider
    of both spans) are protected whole, or with `split` cut at the border. With a stream policy every unprotected
    block is evicted; else the most evictable class, then the lower score (when the session takes scores and every
    candidate has one), then the older, then the smaller start go until the rest fits `budget`. Without an
    executable way (`available_ways`) everything is kept and a diagnostic says so.

    A caller about to prefill or decode passes `recent >= 1`: the last resident token must stay.
    Raises BadBudget, BadSpan, InvalidBlock, OverlappingBlocks, BadScore.
    """
    streams = stream is not None and stream.enabled
    if stream is not None and stream.enabled:
        sink, recent = max(sink, stream.sink), max(recent, stream.recent)
    table, free = prepared(blocks, budget, sink, recent, split)
    said: list[str] = []
    if not available_ways(capabilities, allow_recompute, positions):
        victims = np.empty(0, dtype=np.int64)
        said.append(Diagnostic.STREAM_UNSUPPORTED if streams else Diagnostic.EVICT_UNSUPPORTED)
    elif streams:
        victims = np.flatnonzero(free.mask)
    else:
        victims = _class_victims(table, free, budget, capabilities.attention_scores, said)
    return make_plan(table, free, victims, budget, said)


def prepared(
    blocks: Iterable[Block] | BlockTable, budget: int, sink: int, recent: int, split: bool
) -> tuple[BlockTable, Free]:
    """`blocks` as a table, and what of each block may go.

    Raises BadBudget; else InvalidBlock, OverlappingBlocks, BadScore; else BadSpan.
    """
    _check_budget(budget)
    table = blocks if isinstance(blocks, BlockTable) else BlockTable(blocks)
    return table, free_parts(table, sink, recent, split)


def _check_budget(budget: int) -> None:
    """Raises BadBudget unless `budget` is a whole number of at least one token."""
    if not isinstance(budget, int) or isinstance(budget, bool):
        raise BadBudget(f"budget {budget!r} is no whole number of tokens; round it up first")
    if budget < 0:
        raise BadBudget(f"budget {budget} is negative; give at least 1 token")
    if budget == 0:
        raise BadBudget("budget 0 would leave an empty cache; give at least 1 token")


def first_until(order: Ints, lengths: Ints, excess: int) -> Ints:
    """The head of `order` (indices) whose `lengths` add up to at least `excess` tokens; all of it when they do not."""
    if excess <= 0:
        return order[:0]
    freed = np.cumsum(lengths[order])
    return order[: int(np.searchsorted(freed, excess)) + 1]


def _class_victims(table: BlockTable, free: Free, budget: int, use_scores: bool, said: list[str]) -> Ints:
    """Indices of the blocks to evict, greedily in order until the rest fits."""
    excess = table.n_tokens - budget
    if excess <= 0:
        return np.empty(0, dtype=np.int64)
    candidates, _, incomplete = class_candidates(table, free, use_scores)
    if incomplete:
        said.append(Diagnostic.SCORES_INCOMPLETE)
    return first_until(candidates, free.lengths, excess)


def class_candidates(table: BlockTable, free: Free, use_scores: bool) -> tuple[Ints, bool, bool]:
    """Indices of the candidates, first to go first; whether their scores rank them; whether only some have one."""
    scored = ~np.isnan(table.scores[free.mask]) if use_scores else np.zeros(0, dtype=np.bool_)
    by_score = scored.size > 0 and bool(scored.all())
    order = table.order(by_score)
    return order[free.mask[order]], by_score, bool(scored.any()) and not by_score
