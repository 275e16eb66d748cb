"""What a plan decided, block by block, and whether the planner decides the same again on what the log has."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from kvtape.planner.blocks import Block
from kvtape.planner.plan import Plan
from kvtape.planner.plan_errors import PlanError
from kvtape.planner.ranking import RankedBy, Ranking, ranking
from kvtape.planner.rows import PlanRow
from kvtape.planner.table import BlockTable
from kvtape.sim.explain.moment import Moment

__all__ = ["BlockFate", "Decision", "Rederived", "decision_of"]

_ROUNDING = 1e-5
"""Relative: attention is kept as float32, sums of it over layers and measurements are compared."""


@dataclass(frozen=True, slots=True)
class Rederived:
    """Whether the planner decides the same on the folded state, the blocks and the scores of the log.

    equal          the plan comes out the same, range for range
    within_bounds  scores are known within bounds, and the recorded plan follows from values inside them
    differs        it comes out otherwise (`why`): the log is of another version, or the policy's function has changed
    impossible     it cannot be asked (`why`): the policy's function is not here, or its scores are not in the log
    """

    verdict: Literal["equal", "within_bounds", "differs", "impossible"]
    why: str | None = None


@dataclass(frozen=True, slots=True)
class BlockFate:
    """One resident block and what became of it. `fate`: kept, evicted or split (`evicted` is the part that went).

    `rank`: its place in the order of eviction, 1 goes first; None where nothing ranks it, or scores within bounds do.
    `score_low`, `score_high`: equal where the score is known exactly. `why`: pinned, class task_pinned, sink, recent,
    straddles, ranked, all, chosen, no_need or no_way.
    """

    block: Block
    fate: str
    evicted: tuple[int, int] | None
    rank: int | None
    score_low: float | None
    score_high: float | None
    why: str


@dataclass(frozen=True, slots=True)
class Decision:
    """`need` tokens had to go for the budget, `freed` went. `threshold`: the highest score that went, where known."""

    plan: PlanRow
    ranked_by: RankedBy | None
    need: int
    freed: int
    threshold: float | None
    blocks: tuple[BlockFate, ...]
    rederived: Rederived


def decision_of(moment: Moment) -> Decision:
    """The recorded plan, explained. Never raises for a plan that does not come out again: that is a finding."""
    plan = moment.plan
    gone = {block_id: (start, stop) for block_id, start, stop in json.loads(plan.evict)}
    table = BlockTable(moment.scores.on(moment.blocks))
    order = _order(moment, table)
    fates = _fates(moment, table, order, gone)
    scores = [f.score_high for f in fates if f.evicted is not None and f.score_high is not None]
    return Decision(
        plan=plan,
        ranked_by=None if order is None else order.by,
        need=max(0, plan.total_tokens - plan.budget_tokens),
        freed=plan.total_tokens - plan.hot_tokens,
        threshold=max(scores) if scores and order is not None and order.by == "score" and moment.scores.exact else None,
        blocks=fates,
        rederived=_rederived(moment, table, order, gone),
    )


def _order(moment: Moment, table: BlockTable) -> Ranking | None:
    if moment.policy is None or moment.scores.missing is not None:
        return None
    return ranking(
        moment.policy,
        table,
        budget=moment.plan.budget_tokens,
        capabilities=moment.capabilities,
        allow_recompute=moment.allow_recompute,
    )


def _fates(
    moment: Moment, table: BlockTable, order: Ranking | None, gone: dict[int, tuple[int, int]]
) -> tuple[BlockFate, ...]:
    places: dict[int, int] = {}
    if order is not None and _ranks(moment, order):
        places = {int(i): n for n, i in enumerate(order.candidates.tolist(), 1)}
    out = []
    for i, block in enumerate(table.blocks):
        part = gone.get(block.block_id)
        whole = part == (block.start, block.stop)
        out.append(
            BlockFate(
                block,
                "kept" if part is None else "evicted" if whole else "split",
                part,
                places.get(i),
                moment.scores.low[i],
                moment.scores.high[i],
                _why(moment, table, order, i, part is not None),
            )
        )
    return tuple(out)


def _ranks(moment: Moment, order: Ranking) -> bool:
    """Whether the order is known: of scores within bounds it is not."""
    return order.by in ("age", "draw") or (order.by == "score" and moment.scores.exact)


def _why(moment: Moment, table: BlockTable, order: Ranking | None, i: int, went: bool) -> str:
    block, policy = table.blocks[i], moment.policy
    if block.protected:
        return "pinned" if int(block.flags) else f"class {block.cache_class}"
    if order is None or policy is None:
        return "ranked"
    if order.by == "nothing":
        return "no_way"
    if not order.free.mask[i]:
        recent = table.end - policy.recent
        if block.start < policy.sink:
            return "sink"
        return "recent" if block.stop > recent else "straddles"
    if order.by == "function":
        return "chosen"
    if order.by == "all":
        return "all"
    return "ranked" if went or moment.plan.total_tokens > moment.plan.budget_tokens else "no_need"


def _rederived(moment: Moment, table: BlockTable, order: Ranking | None, gone: dict[int, tuple[int, int]]) -> Rederived:
    if moment.policy is None:
        return Rederived("impossible", moment.policy_error)
    if moment.scores.missing is not None:
        return Rederived("impossible", moment.scores.missing)
    try:
        again = moment.policy.plan(
            table,
            budget=moment.plan.budget_tokens,
            capabilities=moment.capabilities,
            allow_recompute=moment.allow_recompute,
        )
    except PlanError as err:
        return Rederived("differs", f"the planner refuses it: {err}")
    if again is None:
        return Rederived("differs", f"{moment.plan.policy} never plans")
    found = _difference(again, moment.plan)
    if found is None:
        return Rederived("equal" if moment.scores.exact else "within_bounds")
    # Scores are compared as float32 has them; the session ranked by float64.
    if order is not None and order.by == "score" and _follows(moment, table, order, gone):
        return Rederived("within_bounds", "scores are on record as float32, or of a block that was cut since")
    return Rederived("differs", found)


def _difference(again: Plan, plan: PlanRow) -> str | None:
    """The first thing in which the plan differs from the recorded one."""
    pairs: list[tuple[str, object, object]] = [
        ("tokens resident", plan.total_tokens, again.total),
        ("evicted", json.loads(plan.evict), [[b.block_id, b.start, b.stop] for b in again.evict]),
        ("kept", json.loads(plan.keep), [[r.start, r.stop] for r in again.keep]),
        ("protected tokens", plan.protected_tokens, again.protected),
        ("tokens evicted too many", plan.overshoot_tokens, again.overshoot_tokens),
        ("over budget", plan.over_budget, again.over_budget),
        ("diagnostics", json.loads(plan.diagnostics), list(again.diagnostics)),
    ]
    for what, recorded, now in pairs:
        if recorded != now:
            return f"{what}: recorded {_short(recorded)}, the planner of this version gives {_short(now)}"
    return None


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _follows(moment: Moment, table: BlockTable, order: Ranking, gone: dict[int, tuple[int, int]]) -> bool:
    """Whether scores inside the bounds give the recorded plan: whoever stayed may rank behind whoever went."""
    grace = 0 if moment.policy is None else moment.policy.grace
    groups = list(zip((order.free.stops > table.end - grace).tolist(), (-table.ranks).tolist(), strict=True))
    ids, lengths = table.ids.tolist(), order.free.lengths
    went = [i for i in order.candidates.tolist() if ids[i] in gone]
    stayed = [i for i in order.candidates.tolist() if ids[i] not in gone]
    freed, need = int(lengths[went].sum()), moment.plan.total_tokens - moment.plan.budget_tokens
    if not went or len(went) != len(gone) or (stayed and freed < need):
        return False
    last = max(groups[i] for i in went)
    ending = [i for i in went if groups[i] == last]
    floor = max((low for i in ending if (low := moment.scores.low[i]) is not None), default=0.0) * (1 - _ROUNDING)
    behind = all(
        groups[i] > last or (groups[i] == last and ((high := moment.scores.high[i]) is None or high >= floor))
        for i in stayed
    )
    return behind and any(freed - int(lengths[i]) < need for i in ending)
