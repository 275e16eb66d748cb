"""A session as it stood when a plan was made: state, blocks, scores, abilities. Folded from its events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtape.planner.blocks import Block
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.events import Event, Op, Way
from kvtape.planner.outcome import Diagnostic
from kvtape.planner.residency import ResidencyState, apply, check_event
from kvtape.planner.rows import BlockRow, PlanRow, ScoreRow, SessionRow
from kvtape.planner.specs import PolicySpec, parse_policy
from kvtape.sim.errors import WorkloadError
from kvtape.sim.explain.blocks import RecordedBlocks
from kvtape.sim.explain.scores import BlockScores, RecordedScores

__all__ = ["Moment", "RecordedSession", "SessionLog", "moment_of", "recorded_session"]

_NO_WAY = (Diagnostic.STREAM_UNSUPPORTED, Diagnostic.EVICT_UNSUPPORTED)


class SessionLog(Protocol):
    """What is read of a log; `traces.reader.Log` has it."""

    def session(self, run_id: str, session_id: str) -> SessionRow: ...

    def events(self, run_id: str, session_id: str) -> Sequence[Event]: ...

    def blocks(self, run_id: str, session_id: str) -> Sequence[BlockRow]: ...

    def plans(self, run_id: str, session_id: str) -> Mapping[int, PlanRow]: ...

    def scores(self, run_id: str, session_id: str) -> Sequence[ScoreRow]: ...


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """One session's rows. `events` by seq, up to the first that tells of lost ones."""

    row: SessionRow
    events: tuple[Event, ...]
    blocks: tuple[BlockRow, ...]
    plans: Mapping[int, PlanRow]
    scores: tuple[ScoreRow, ...]


@dataclass(frozen=True, slots=True)
class Moment:
    """What the planner was asked. `state` and `blocks` (all resident, in tape order, without scores) before the plan.

    `scores` are those that the policy of the plan ranked by, `recorded_scores` answers for others. `allow_recompute`:
    whether evicts might be carried out by rebuilding, which no column has: it follows from what the session did.
    `policy_error`: why the policy of the plan is not to be had here; `policy` is None then.
    """

    row: SessionRow
    plan: PlanRow
    state: ResidencyState
    blocks: tuple[Block, ...]
    policy: PolicySpec | None
    policy_error: str | None
    scores: BlockScores
    recorded_scores: RecordedScores
    capabilities: Capabilities
    allow_recompute: bool


def recorded_session(log: SessionLog, run_id: str, session_id: str) -> RecordedSession:
    """Raises traces.errors.NoSuchRow for a session that is not there."""
    events = list(log.events(run_id, session_id))
    lost = next((i for i, e in enumerate(events) if e.op == Op.LOST), len(events))
    return RecordedSession(
        log.session(run_id, session_id),
        tuple(events[:lost]),
        tuple(log.blocks(run_id, session_id)),
        log.plans(run_id, session_id),
        tuple(log.scores(run_id, session_id)),
    )


def moment_of(session: RecordedSession, plan_seq: int) -> Moment:
    """The moment at which the plan of event `plan_seq` was made.

    Raises WorkloadError for what is no plan, IllegalEvent and ResidencyMismatch for a log that does not fold.
    """
    plan = session.plans.get(plan_seq)
    if plan is None:
        raise WorkloadError(
            f"session {session.row.session_id}: event {plan_seq} is no plan"
            '; kvtape sql LOG "SELECT seq FROM decisions" lists the plans'
        )
    first = parse_policy(session.row.policy).hole if session.row.policy else "refill"
    blocks, scores = RecordedBlocks(session.blocks, first), RecordedScores(session.scores)
    state = ResidencyState()
    for event in session.events:
        if event.seq == plan_seq:
            break
        blocks.apply(event, state.resident)
        scores.apply(event, state.tape_length)
        state = apply(state, event)
        check_event(state, event)
    there = tuple(blocks.resident(state.resident))
    policy, why = _policy(plan.policy)
    known = (None,) * len(there)
    able = _capabilities(session.row)
    return Moment(
        row=session.row,
        plan=plan,
        state=state,
        blocks=there,
        policy=policy,
        policy_error=why,
        scores=BlockScores(known, known) if policy is None else scores.of(policy, there, own=True),
        recorded_scores=scores,
        capabilities=able,
        allow_recompute=_may_recompute(session, plan, able, policy),
    )


def _policy(text: str) -> tuple[PolicySpec | None, str | None]:
    try:
        return parse_policy(text), None
    except ValueError as err:
        return None, str(err)


def _capabilities(row: SessionRow) -> Capabilities:
    try:
        return Capabilities(**json.loads(row.capabilities or "{}"))
    except (TypeError, ValueError):
        raise WorkloadError(
            f"session {row.session_id}: its capabilities are not readable"
            "; kvtape verify LOG says whether it was changed"
        ) from None


def _may_recompute(session: RecordedSession, plan: PlanRow, can: Capabilities, policy: PolicySpec | None) -> bool:
    """A cold store allows it; an evict that was carried out so proves it; else a plan that found a way where the
    engine alone has none does."""
    if session.row.cold_budget_tokens or any(e.op == Op.EVICT and e.way == Way.RECOMPUTE for e in session.events):
        return True
    said = json.loads(plan.diagnostics)
    return policy is not None and not policy.ways(can) and not any(d in _NO_WAY for d in said)
