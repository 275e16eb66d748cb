"""What the parity contract says of a log: found wrong in it, row by row. A log can break an invariant, never prove it.

I1 fatal discipline, I2 capability truth, I3 actionable plans. I4, the counters, is SQL: `identities`. What a session
has to ask for, I5 to I7, is in `opt_ins`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtape.backends.errors import Cancelled, FatalClass
from kvtape.planner.events import Event, Op, Way
from kvtape.planner.ranges import RangeSet
from kvtape.planner.rows import PlanRow, SessionRow
from kvtape.planner.scores import is_dense

__all__ = ["Broken", "capability_findings", "fatal_findings", "plan_findings"]


@dataclass(frozen=True, slots=True)
class Broken:
    """A row that breaks an invariant: where it stands and what is wrong, in one line."""

    session_id: str
    seq: int
    what: str


_CLASSES = frozenset(str(c) for c in FatalClass)


def fatal_findings(events: Iterable[Event]) -> list[Broken]:
    """I1: a fatal names one of the six classes and its cause, is the only one, and nothing is done behind it."""
    found: list[Broken] = []
    first: Event | None = None
    for e in events:
        if first is not None and e.op not in (Op.CLOSE, Op.LOST):
            found.append(Broken(e.session_id, e.seq, f"{e.op} behind the fatal of seq {first.seq}"))
        elif e.op is Op.FATAL:
            first = e
            if e.error_class not in _CLASSES:
                found.append(Broken(e.session_id, e.seq, f"fatal of class {e.error_class!r}, which is none"))
            if not e.reason:
                found.append(Broken(e.session_id, e.seq, "fatal without a cause"))
    return found


_NEEDS: dict[Op, str] = {
    Op.SHIFT: "position_shift",
    Op.ADMIT: "cold_store",
    Op.RECOMPUTE: "recompute_range",
    Op.SNAPSHOT: "snapshot_state",
    Op.RESTORE: "snapshot_state",
    Op.SCORE: "attention_scores",
}
_WAY_NEEDS: dict[Way, tuple[str, ...]] = {
    Way.GAP: ("remove_middle",),
    Way.REBASED: ("remove_middle", "position_shift"),
    Way.RECOMPUTE: ("recompute_range",),
}


def capability_findings(session: SessionRow, events: Iterable[Event]) -> list[Broken]:
    """I2: nothing was executed that the session's own struct says it cannot do. Without a struct there is no claim."""
    struct: dict[str, object] = json.loads(session.capabilities or "{}")
    if not struct:
        return []
    found: list[Broken] = []
    for e in events:
        # A dense pass runs on a context of its own.
        needed = [_NEEDS[e.op]] if e.op in _NEEDS and not is_dense(e) else []
        if e.op is Op.EVICT and e.way is not None:
            needed += [*_WAY_NEEDS.get(e.way, ()), *(["cold_store"] if e.cold else [])]
        found += [
            Broken(e.session_id, e.seq, f"{e.op} was executed, although {flag} is false")
            for flag in needed
            if not struct.get(flag)
        ]
    return found


def plan_findings(events: Sequence[Event], plans: Mapping[int, PlanRow]) -> list[Broken]:
    """I3: what a plan evicts is what was evicted right behind it, or the plan says that there is no way.

    A plan that a failure, a cancel or the end of the log cut short may have evicted less, never something else.
    """
    found: list[Broken] = []
    for i, event in enumerate(events):
        if event.op is not Op.PLAN:
            continue
        plan = plans.get(event.seq)
        if plan is None:
            found.append(Broken(event.session_id, event.seq, "a plan event without its plan"))
            continue
        wanted = RangeSet([(start, stop) for _, start, stop in json.loads(plan.evict)])
        done, cut_short = _carried_out(events, i + 1)
        if done != wanted and not (cut_short and done.issubset(wanted)):
            what = f"the plan evicts {wanted.as_pairs()}, {done.as_pairs()} was evicted behind it"
            found.append(Broken(event.session_id, event.seq, what))
        if plan.over_budget and not json.loads(plan.diagnostics):
            found.append(Broken(event.session_id, event.seq, "over budget, and no diagnostic says why"))
    return found


def _carried_out(events: Sequence[Event], at: int) -> tuple[RangeSet, bool]:
    """What the evicts from index `at` took out, and whether they were cut short: by a failure, a cancel or the end."""
    done = RangeSet()
    for event in events[at:]:
        if event.op is Op.EVICT and event.start is not None and event.stop is not None:
            done |= RangeSet([(event.start, event.stop)])
        elif event.op is Op.REFUSE and event.error_class == Cancelled.__name__:
            return done, True
        elif event.op not in (Op.SHIFT, Op.TRIM, Op.REFUSE):
            # A cancel first takes back what the operation had computed; its refusal comes behind that.
            taken_back = event.op is Op.TRUNCATE and event.reason == "cancelled"
            return done, taken_back or event.op in (Op.FATAL, Op.CLOSE, Op.LOST)
    return done, True
