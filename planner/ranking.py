"""In which order a policy gives blocks up: what its plan follows, for those who explain one.

A plan evicts the head of this order, as much of it as is needed; under `all` every candidate goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvtape.planner.capabilities import Capabilities
from kvtape.planner.plan import class_candidates
from kvtape.planner.ranked import draw_order, ranked_candidates
from kvtape.planner.spans import Free, free_parts
from kvtape.planner.specs import PolicySpec
from kvtape.planner.table import BlockTable, Ints

__all__ = ["RankedBy", "Ranking", "ranking"]

RankedBy = Literal["nothing", "all", "age", "score", "draw", "function"]
"""`nothing` can be evicted; `all` candidates go; `function`: a policy of the user's own chose among them."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """`candidates` int64: indices into the table of what may go, the first to go first; in tape order where nothing
    ranks them. `free`: what of each block may go."""

    by: RankedBy
    candidates: Ints
    free: Free


def ranking(
    policy: PolicySpec, table: BlockTable, *, budget: int, capabilities: Capabilities, allow_recompute: bool = False
) -> Ranking:
    """The order behind `policy.plan(table, ...)` with the same arguments. Raises BadSpan."""
    split = policy.split and policy.function is None
    free = free_parts(table, policy.sink, policy.recent, split)
    if not policy.evicts or not policy.ways(capabilities, allow_recompute):
        return Ranking("nothing", np.empty(0, dtype=np.int64), free)
    if policy.function is not None:
        return Ranking("function", np.flatnonzero(free.mask), free)
    if policy.seed is not None:
        return Ranking("draw", ranked_candidates(table, free, draw_order(table, policy.seed), policy.grace), free)
    if policy.score_request is not None:
        if capabilities.attention_scores and not np.isnan(table.scores[free.mask]).all():
            return Ranking("score", ranked_candidates(table, free, table.order(by_score=True), policy.grace), free)
        free = free_parts(table, policy.sink, max(policy.recent, budget - policy.sink), split=True)
        return Ranking("all", np.flatnonzero(free.mask), free)
    if policy.name == "stream":
        return Ranking("all", np.flatnonzero(free.mask), free)
    candidates, by_score, _ = class_candidates(table, free, capabilities.attention_scores)
    return Ranking("score" if by_score else "age", candidates, free)
