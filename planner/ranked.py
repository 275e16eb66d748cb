"""Plans that rank candidates by something other than age: attention scores, or a seeded draw.

Protected blocks are taken out before anything is ranked. Then the more evictable class goes first, then the lower
rank, until the rest fits; the newest `grace` tokens go only when nothing else is left.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvtape.planner.blocks import Block
from kvtape.planner.outcome import Diagnostic, Plan, make_plan
from kvtape.planner.plan import first_until, prepared
from kvtape.planner.plan_errors import BadSpan
from kvtape.planner.spans import Free, free_parts
from kvtape.planner.table import BlockTable, Bools, Ints

__all__ = ["draw_order", "plan_random", "plan_scored", "ranked_candidates"]


def plan_scored(
    blocks: Iterable[Block] | BlockTable,
    *,
    budget: int,
    sink: int = 0,
    recent: int = 1,
    grace: int = 0,
    split: bool = False,
    can_score: bool,
    can_evict: bool,
) -> Plan:
    """Lowest score first; a tie goes to the older, then to the smaller start. Candidates without a score go last.

    When the session takes no scores, or no candidate has one, it keeps exactly what `stream` keeps with the same
    `sink` and `recent = budget - sink` (never less recent than asked), split at the borders as `stream` does.
    Raises BadBudget, BadSpan, InvalidBlock, OverlappingBlocks, BadScore.
    """
    table, free = prepared(blocks, budget, sink, recent, split)
    has_score = ~np.isnan(table.scores)
    if not can_evict:
        return make_plan(table, free, _none(), budget, [Diagnostic.EVICT_UNSUPPORTED])
    if not can_score or not has_score[free.mask].any():
        free = free_parts(table, sink, max(recent, budget - sink), split=True)
        victims = np.flatnonzero(free.mask)
        return make_plan(table, free, victims, budget, [Diagnostic.SCORES_MISSING] if victims.size else [])
    order = table.order(by_score=True)
    victims = _ranked_victims(table, free, order, budget, grace)
    said = [] if has_score[free.mask].all() or not victims.size else [Diagnostic.SCORES_INCOMPLETE]
    return make_plan(table, free, victims, budget, said, _starved(free.mask, victims))


def plan_random(
    blocks: Iterable[Block] | BlockTable,
    *,
    budget: int,
    sink: int = 0,
    recent: int = 1,
    grace: int = 0,
    split: bool = False,
    seed: int,
    can_evict: bool,
) -> Plan:
    """The null baseline: every block draws its rank once, from `seed` and its first position. Raises as above."""
    table, free = prepared(blocks, budget, sink, recent, split)
    if not can_evict:
        return make_plan(table, free, _none(), budget, [Diagnostic.EVICT_UNSUPPORTED])
    return make_plan(table, free, _ranked_victims(table, free, draw_order(table, seed), budget, grace), budget, [])


def draw_order(table: BlockTable, seed: int) -> Ints:
    """Indices by class, then by a draw that depends on the seed and the block's start alone (SplitMix64)."""
    with np.errstate(over="ignore"):
        z = _mix(table.starts.astype(np.uint64) + _mix(np.full(1, seed, dtype=np.uint64)))
    return np.lexsort((z, -table.ranks)).astype(np.int64, copy=False)


def _mix(values: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def ranked_candidates(table: BlockTable, free: Free, order: Ints, grace: int) -> Ints:
    """Those of `order` that may go, in that order, the newest `grace` tokens behind all others. Raises BadSpan."""
    if grace < 0:
        raise BadSpan(f"grace {grace} must not be negative")
    candidates = order[free.mask[order]]
    young = free.stops[candidates] > table.end - grace
    return np.concatenate((candidates[~young], candidates[young]))


def _ranked_victims(table: BlockTable, free: Free, order: Ints, budget: int, grace: int) -> Ints:
    excess = table.n_tokens - budget
    return first_until(ranked_candidates(table, free, order, grace), free.lengths, excess)


def _starved(candidates: Bools, victims: Ints) -> int:
    """Victims that are newer than every candidate that stays: the young end of the cache went in one piece.

    Accumulated mass does this once evictions begin, for the young have had no time to accumulate any.
    """
    stays = candidates.copy()
    stays[victims] = False
    left = np.flatnonzero(stays)
    return int((victims > left[-1]).sum()) if left.size else 0


def _none() -> Ints:
    return np.empty(0, dtype=np.int64)
