"""Why tokens were computed: new to the tape, cut off it, or evicted before; and by which events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.planner.events import Event, Op
from kvtape.planner.ranges import RangeSet
from kvtape.planner.residency import ResidencyState, apply
from kvtape.sim.explain.moment import RecordedSession

__all__ = ["Computed", "Eviction", "computed_by", "evictions_of", "plan_behind", "span_of"]


@dataclass(frozen=True, slots=True)
class Eviction:
    """`ranges` were last given up by the evict of event `seq`; `plan_seq`: the plan that said so, None if a caller."""

    seq: int
    plan_seq: int | None
    ranges: RangeSet


@dataclass(frozen=True, slots=True)
class Computed:
    """What the tokens of a prefill or recompute event were before.

    `new` stood nowhere on the tape, or other tokens of a turn before did and were long gone. `cut`: resident until the
    turn's truncate (`cut_seq`, `cut_reason`). `evicted`: not resident at that cut, or filled in place, by the evicts
    that had taken them.
    """

    new: RangeSet
    cut: RangeSet
    cut_seq: int | None
    cut_reason: str | None
    evicted: tuple[Eviction, ...]


def plan_behind(events: Sequence[Event], at: int) -> int | None:
    """Seq of the plan that event `at` carries out, or that was made for it; None where there is none."""
    event = events[at]
    if event.op == Op.PLAN:
        return event.seq
    if event.op in (Op.EVICT, Op.SHIFT) and not _planned(event):
        return None
    stops = (Op.PROMPT, Op.GENERATE, Op.PREFILL, Op.DECODE, Op.RESTORE, Op.SNAPSHOT, Op.OPEN, Op.ADMIT, Op.RECOMPUTE)
    for before in reversed(events[:at]):
        if before.op == Op.PLAN:
            return before.seq
        if before.op in stops or (before.op == Op.EVICT and not _planned(before)):
            return None
    return None


def _planned(event: Event) -> bool:
    return (event.reason or "").startswith("plan:")


def span_of(event: Event) -> RangeSet:
    """The tape positions of an event that has a range; nothing for one that has only a beginning."""
    return RangeSet() if event.start is None or event.stop is None else RangeSet([(event.start, event.stop)])


def evictions_of(events: Sequence[Event], ranges: RangeSet, before_seq: int) -> tuple[Eviction, ...]:
    """The last evicts before `before_seq` that took tokens of `ranges` out, the latest first."""
    left, found = ranges, []
    for at in range(min(before_seq, len(events)) - 1, -1, -1):
        event = events[at]
        if not left:
            break
        if event.op == Op.EVICT:
            mine = left & span_of(event)
            if mine:
                found.append(Eviction(event.seq, plan_behind(events, at), mine))
                left -= mine
    return tuple(found)


def computed_by(session: RecordedSession, seq: int) -> Computed:
    """What is said of the prefill or recompute of event `seq`.

    A suffix that waited was computed with what waited before it, which it did not ask for.
    """
    events = session.events
    event = events[seq]
    span = span_of(event)
    if event.op == Op.RECOMPUTE:
        return Computed(RangeSet(), RangeSet(), None, None, evictions_of(events, span, seq))
    asked = (e for e in reversed(events[:seq]) if not (e.reason == "suffix" and (e.start or 0) > span.ranges[0].start))
    cut = next((e for e in asked if e.op in (Op.TRUNCATE, Op.PROMPT)), None)
    if cut is None or cut.op == Op.PROMPT or cut.turn != event.turn:
        return Computed(span, RangeSet(), None, None, ())
    state = ResidencyState()
    for e in events[: cut.seq]:
        state = apply(state, e)
    was = span & RangeSet([(0, state.tape_length)])
    there = was & state.resident
    gone = evictions_of(events, was - there, cut.seq)
    return Computed(span - was, there, cut.seq, cut.reason, gone)
