"""When to plan, and carrying a plan out: the only place where a policy meets a running session."""

from __future__ import annotations

import json

import numpy as np

from kvtape.backends import scoring, surgery
from kvtape.backends.errors import ContextOverflow
from kvtape.backends.parts import Parts
from kvtape.planner import layout as lay
from kvtape.planner.events import Op, Way
from kvtape.planner.plan import Plan
from kvtape.planner.rows import PlanRow

__all__ = ["fits", "make_room", "plan_now", "refuse_positions", "rows_before_plan"]


def rows_before_plan(parts: Parts) -> int:
    """How many more tokens may be computed before a plan is due; at least 1 while there is a free row."""
    room = parts.policy.limit(parts.n_ctx) - parts.state.resident_tokens
    if parts.policy.evicts and room <= 0:
        room = parts.policy.every - parts.tokens_since_plan
    return max(1, min(room, parts.free_rows, _positions_left(parts)))


def make_room(parts: Parts, incoming: int) -> int:
    """Make room for `incoming` tokens, planning and evicting when the limit would be passed.

    Returns how many tokens can be computed now, 1 to `incoming`. Raises ContextOverflow when not even one can.
    """
    limit = parts.policy.limit(parts.n_ctx)
    over = parts.state.resident_tokens + incoming - limit
    full = incoming > parts.free_rows
    if parts.policy.evicts and over > 0 and (full or parts.tokens_since_plan >= parts.policy.every):
        # A piece larger than what the policy may keep would ask for a budget of nothing.
        incoming = min(incoming, max(1, limit // 2)) if parts.policy.budget is not None else incoming
        _plan_and_evict(parts, incoming, limit, "n_ctx" if limit == parts.n_ctx else "budget")
    elif over > 0:
        # No plan yet, so the piece ends where one is due.
        incoming = min(incoming, rows_before_plan(parts))
    if parts.free_rows <= 0:
        why = _why_full(parts)
        raise ContextOverflow(parts.state.resident_tokens + 1, parts.n_ctx, why)
    _keep_positions_in_range(parts, incoming)
    return min(incoming, parts.free_rows, _positions_left(parts))


def fits(parts: Parts, ahead: int, incoming: int) -> bool:
    """Whether `make_room(incoming)` would decide nothing and shorten nothing once `ahead` more tokens are computed."""
    after = ahead + incoming
    return after <= parts.policy.limit(parts.n_ctx) - parts.state.resident_tokens and after <= _positions_left(parts)


def refuse_positions(parts: Parts, keep: int, incoming: int) -> None:
    """Raises ContextOverflow where it is known that positions run past the trained context.

    Of `incoming` tokens behind the first `keep` of the tape; an evict or a compaction could win positions back, so
    nothing is known where there may be one.
    """
    kept = lay.cut(parts.state.layout, keep)
    at, trained = lay.next_cache_position(kept), parts.backend.facts.n_ctx_train
    may_change = parts.policy.evicts or at > sum(s.length for s in kept)
    if at + incoming > trained and not may_change:
        raise ContextOverflow(at + incoming, trained, "positions would run past the trained context")


def plan_now(parts: Parts, limit: int | None = None) -> None:
    """Plan and evict down to `limit` (default: the policy's), less one for the next token."""
    limit = parts.policy.limit(parts.n_ctx) if limit is None else limit
    if parts.policy.evicts and parts.state.resident_tokens >= limit:
        _plan_and_evict(parts, 1, limit, "asked")


def _why_full(parts: Parts) -> str:
    if not parts.policy.evicts:
        return f"policy {parts.policy.name} never evicts"
    if surgery.choose_way(parts) is None:
        return f"nothing can be evicted here: {parts.refusal('remove_middle') or 'no way to carry it out'}"
    return "the protected part alone fills it"


def _plan_and_evict(parts: Parts, incoming: int, limit: int, trigger: str) -> None:
    table = parts.catalog.resident_table(parts.state.resident)
    if not table.blocks:
        return
    budget = max(1, limit - incoming)
    scored = scoring.scored(parts, table.blocks)
    # What measuring took is the score event's, and no time is told twice.
    began = parts.now()
    plan = parts.policy.plan(
        table if scored is table.blocks else scored,
        budget=budget,
        capabilities=parts.capabilities,
        allow_recompute=parts.allow_recompute,
    )
    if plan is None:
        return
    parts.last_plan = _plan_row(parts, plan, incoming, limit, trigger)
    parts.journal.emit(
        Op.PLAN,
        began,
        plan=parts.last_plan,
        n_tokens=plan.total - plan.hot,
        reason=trigger,
        elapsed_ns=parts.now() - began,
    )
    parts.tokens_since_plan = 0
    way = surgery.choose_way(parts)
    if plan.evict_starts.size and way is not None:
        ranges = zip(plan.evict_starts.tolist(), plan.evict_stops.tolist(), strict=True)
        surgery.evict(parts, ranges, way, f"plan:{trigger}")


def _plan_row(parts: Parts, plan: Plan, incoming: int, limit: int, trigger: str) -> PlanRow:
    return PlanRow(
        run_id=parts.journal.run_id,
        session_id=parts.journal.session_id,
        seq=parts.journal.next_seq,
        policy=parts.policy.canonical,
        trigger=trigger,
        limit_tokens=limit,
        incoming_tokens=incoming,
        budget_tokens=plan.budget,
        total_tokens=plan.total,
        hot_tokens=plan.hot,
        protected_tokens=plan.protected,
        overshoot_tokens=plan.overshoot_tokens,
        over_budget=plan.over_budget,
        keep=_json(np.column_stack((plan.keep_starts, plan.keep_stops)).tolist()),
        evict=_json(np.column_stack((plan.evict_ids, plan.evict_starts, plan.evict_stops)).tolist()),
        diagnostics=_json(list(plan.diagnostics)),
    )


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _positions_left(parts: Parts) -> int:
    """Cache positions below the trained context; the engine computes past it, the model was not made for it."""
    return max(0, parts.backend.facts.n_ctx_train - parts.state.next_cache_position)


def _keep_positions_in_range(parts: Parts, incoming: int) -> None:
    """Under gaps positions run on; one compaction brings them back before they pass the trained context."""
    if parts.policy.positions != "gap" and _positions_left(parts) < incoming and _has_holes(parts):
        if parts.capabilities.position_shift:
            surgery.compact(parts, "trained_context")
        elif parts.allow_recompute and parts.capabilities.recompute_range:
            _rebuild_in_rank_order(parts)
    if _positions_left(parts) <= 0:
        needed, trained = parts.state.next_cache_position + 1, parts.backend.facts.n_ctx_train
        raise ContextOverflow(needed, trained, "positions reach the trained context and cannot be compacted here")


def _has_holes(parts: Parts) -> bool:
    return parts.state.next_cache_position > parts.state.resident_tokens


def _rebuild_in_rank_order(parts: Parts) -> None:
    """Without rotation, positions only come back by computing the survivors again: a truncate of nothing."""
    began = parts.now()
    kept = parts.state.resident
    result = parts.backend.rebuild(kept, parts.tokens_of(kept))
    parts.journal.emit(
        Op.TRUNCATE,
        began,
        start=len(parts.tape),
        stop=len(parts.tape),
        n_tokens=0,
        way=Way.RECOMPUTE,
        physical_prefill_calls=result.calls,
        physical_prefill_tokens=result.tokens,
        recomputed_tokens=result.tokens,
        reason="trained_context",
        elapsed_ns=parts.now() - began,
        kv_bytes=parts.resident_bytes(),
    )
