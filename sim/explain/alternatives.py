"""What other policies would have done at the very moment of a plan: the same blocks, the same scores, the same need."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Final

from kvtape.planner.plan_errors import PlanError
from kvtape.planner.ranges import RangeSet
from kvtape.planner.specs import DEFAULT_SINK, SpecError, parse_policy
from kvtape.sim.explain.moment import Moment

__all__ = ["Alternative", "alternative_of", "usual_policies"]


_NOTHING: Final = RangeSet()


@dataclass(frozen=True, slots=True)
class Alternative:
    """One policy's answer. Ranges in tape positions.

    `due`: whether it would have planned at all; what is resident may fit its own budget. `overflows`: what it keeps
    leaves no row for the next token. `evicts_only` went here and stayed in the recording, `keeps_only` the reverse;
    `error`: why there is no answer, everything else is None or empty then.
    """

    policy: str
    due: bool | None = None
    budget_tokens: int | None = None
    kept_tokens: int | None = None
    evict: RangeSet = _NOTHING
    evicts_only: RangeSet = _NOTHING
    keeps_only: RangeSet = _NOTHING
    overflows: bool | None = None
    diagnostics: tuple[str, ...] = ()
    error: str | None = None


def usual_policies(moment: Moment) -> list[str]:
    """`none`, `stream`, `class` and, where what it ranks by was measured for the plan, `h2o`: with the recorded limit
    as budget, and the sinks of the recorded policy."""
    limit, recorded = moment.plan.limit_tokens, moment.policy
    sink = DEFAULT_SINK if recorded is None else recorded.sink
    recent = max(1, limit * 3 // 4 - sink)
    texts = ["none", f"stream:sink={sink},recent={recent}", f"class:budget={limit}"]
    share = max(1, limit // 4)
    if moment.capabilities.attention_scores and limit > sink + share:
        texts.append(f"h2o:budget={limit},recent={share}" + (f",sink={sink}" if sink else ""))
    found = []
    for text in texts:
        try:
            policy = parse_policy(text)
        except SpecError:
            continue  # no such policy in so small a context
        if recorded is not None and policy.name == recorded.name:
            continue
        if policy.score_request is None or moment.recorded_scores.of(policy, moment.blocks).exact:
            found.append(policy.canonical)
    return found


def alternative_of(moment: Moment, text: str) -> Alternative:
    """What `text` would have done. Raises SpecError for a spec that is none; what cannot be answered is in `error`.

    A policy with a budget of its own is asked for that, another one for the limit that the recorded plan had. `every=`
    and `block=` are of no account: it is asked at this moment, for the blocks that were there.
    """
    policy = parse_policy(text)
    n_ctx = moment.state.n_ctx
    try:
        policy.check_context(n_ctx)
    except SpecError as err:
        return Alternative(policy.canonical, error=str(err))
    scores = moment.recorded_scores.of(policy, moment.blocks)
    if policy.score_request is not None and not moment.capabilities.attention_scores:
        return Alternative(policy.canonical, error="it ranks by attention, and the recorded session took no scores")
    if scores.missing is not None:
        return Alternative(policy.canonical, error=f"{scores.missing}; 0 or recency in its place would be made up")
    if not scores.exact:
        why = "a block was cut since it was measured, or its tokens count differently: scores are known within bounds"
        return Alternative(policy.canonical, error=why)
    plan = moment.plan
    own = None if plan.trigger == "asked" else policy.budget
    limit = min(n_ctx, plan.limit_tokens if own is None else own)
    over = plan.total_tokens + plan.incoming_tokens > limit
    if not policy.evicts or not over:
        return _compared(moment, Alternative(policy.canonical, due=policy.evicts and over), RangeSet())
    budget = max(1, limit - plan.incoming_tokens)
    try:
        found = policy.plan(
            scores.on(moment.blocks),
            budget=budget,
            capabilities=moment.capabilities,
            allow_recompute=moment.allow_recompute,
        )
    except PlanError as err:
        return Alternative(policy.canonical, due=True, budget_tokens=budget, error=str(err))
    assert found is not None
    answer = Alternative(policy.canonical, due=True, budget_tokens=budget, diagnostics=found.diagnostics)
    return _compared(moment, answer, RangeSet((b.start, b.stop) for b in found.evict))


def _compared(moment: Moment, answer: Alternative, evict: RangeSet) -> Alternative:
    recorded = RangeSet((start, stop) for _, start, stop in json.loads(moment.plan.evict))
    kept = moment.plan.total_tokens - evict.n_tokens
    return replace(
        answer,
        kept_tokens=kept,
        evict=evict,
        evicts_only=evict - recorded,
        keeps_only=recorded - evict,
        overflows=kept + 1 > moment.state.n_ctx,
    )
