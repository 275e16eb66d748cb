"""One event explained: the plan that decided it, what else could have been decided, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.planner.events import Event, Op
from kvtape.planner.ranges import RangeSet
from kvtape.planner.specs import parse_policy
from kvtape.sim.errors import WorkloadError
from kvtape.sim.explain.alternatives import Alternative, alternative_of, usual_policies
from kvtape.sim.explain.computed import Computed, Eviction, computed_by, evictions_of, plan_behind, span_of
from kvtape.sim.explain.decision import Decision, decision_of
from kvtape.sim.explain.hindsight import Outcome, hindsight
from kvtape.sim.explain.moment import Moment, RecordedSession, moment_of

__all__ = ["Explained", "explain_event"]


@dataclass(frozen=True, slots=True)
class Explained:
    """`plan_seq`: the plan behind the event, None where no policy decided it; everything about it is empty then.

    `computed`: of a prefill or recompute, what its tokens were before. `evicted_by`: of an admit, the evicts that had
    taken its rows.
    """

    event: Event
    plan_seq: int | None
    moment: Moment | None
    decision: Decision | None
    alternatives: tuple[Alternative, ...]
    outcomes: tuple[Outcome, ...]
    computed: Computed | None
    evicted_by: tuple[Eviction, ...]


def explain_event(session: RecordedSession, seq: int, policies: Sequence[str] | None = None) -> Explained:
    """Event `seq` of the session; `policies`: which to compare with, None for the usual ones.

    Raises WorkloadError for an event that is not there or comes after lost ones, SpecError for a policy that is none,
    IllegalEvent and ResidencyMismatch for a log that does not fold.
    """
    events, name = session.events, session.row.session_id
    if not 0 <= seq < len(events):
        last = f"its events are 0 to {len(events) - 1}" if events else "it has none"
        raise WorkloadError(f"session {name}: no event {seq} that can be folded; {last}")
    asked = None if policies is None else [parse_policy(text).canonical for text in policies]
    event = events[seq]
    computed = computed_by(session, seq) if event.op in (Op.PREFILL, Op.RECOMPUTE) else None
    evicted_by = evictions_of(events, span_of(event), seq) if event.op == Op.ADMIT else ()
    plan_seq = plan_behind(events, seq)
    if plan_seq is None or plan_seq not in session.plans:
        return Explained(event, None, None, None, (), (), computed, evicted_by)
    moment = moment_of(session, plan_seq)
    decision = decision_of(moment)
    asked = usual_policies(moment) if asked is None else asked
    gone = RangeSet(f.evicted for f in decision.blocks if f.evicted is not None)
    return Explained(
        event,
        plan_seq,
        moment,
        decision,
        tuple(alternative_of(moment, text) for text in asked),
        hindsight(session, plan_seq, gone),
        computed,
        evicted_by,
    )
