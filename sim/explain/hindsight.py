"""What became of the tokens that a plan gave up: were they asked for again later in this log?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvtape.planner.events import Event, Op
from kvtape.planner.ranges import RangeSet
from kvtape.planner.residency import ResidencyState, apply
from kvtape.sim.explain.blocks import FILLS
from kvtape.sim.explain.moment import RecordedSession

__all__ = ["Outcome", "hindsight"]

What = Literal["admitted", "recomputed", "restored", "prefilled_again", "forgotten", "off_the_tape", "never_asked"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`ranges` of what was evicted, in tape positions, and what happened to them first at event `seq`.

    admitted, recomputed   came back for a prompt that has them, or because the caller asked
    restored          came back with a snapshot
    prefilled_again   the reuse of a prompt ended at their hole, and what was behind was computed again
    forgotten         a prompt has them, and the session went on without; `turns` of the log did so
    off_the_tape      the tape was cut before them: other tokens stand there since
    never_asked       nothing of that until the log ends; `seq` is None
    """

    what: What
    ranges: RangeSet
    seq: int | None
    turns: int = 0


def hindsight(session: RecordedSession, plan_seq: int, evicted: RangeSet) -> tuple[Outcome, ...]:
    """In the order in which it happened; every evicted token ends in exactly one outcome beside `forgotten`."""
    watch = _Watch(evicted)
    state = ResidencyState()
    for event in session.events:
        before, state = state, apply(state, event)
        if event.seq > plan_seq:
            watch.see(event, before, state)
            if not watch.left:
                break
    return watch.outcomes()


class _Watch:
    """`left`: what was evicted, is not resident, and still on the tape; empty until the plan is carried out."""

    def __init__(self, evicted: RangeSet) -> None:
        self.left = evicted
        self._going = evicted
        self._asked: tuple[int, int] | None = None
        self._found: list[Outcome] = []

    def see(self, event: Event, before: ResidencyState, after: ResidencyState) -> None:
        if self._going:  # the plan's own evicts, one run after the other
            self._going = self._going & after.resident
            if event.op in (Op.EVICT, Op.SHIFT):
                return
            # What was not carried out was not given up.
            self.left, self._going = self.left - self._going, RangeSet()
        self._settle(event)
        if event.op == Op.PROMPT and event.reason != "suffix":
            self._asked = (event.start or 0, event.seq)
        elif event.op == Op.TRUNCATE:
            cut = RangeSet([(event.start or 0, max(event.start or 0, before.tape_length))])
            again = event.reason == "hole"
            self._take("prefilled_again" if again else "off_the_tape", self.left & cut, event.seq)
        elif event.op == Op.RESTORE:
            gone = RangeSet([(after.tape_length, max(after.tape_length, before.tape_length))])
            self._take("restored", self.left & after.resident, event.seq)
            self._take("off_the_tape", self.left & gone, event.seq)
        elif event.op in (Op.ADMIT, Op.RECOMPUTE):
            back = self.left & after.resident
            self._take("admitted" if event.op == Op.ADMIT else "recomputed", back, event.seq)

    def _settle(self, event: Event) -> None:
        """Once a prompt's holes are filled, what it has and is still not there is forgotten."""
        if self._asked is None or event.op in FILLS:
            return
        (reused, seq), self._asked = self._asked, None
        missing = self.left & RangeSet([(0, reused)])
        if not missing:
            return
        for i, known in enumerate(self._found):
            if known.what == "forgotten":
                self._found[i] = replace(known, ranges=known.ranges | missing, turns=known.turns + 1)
                return
        self._found.append(Outcome("forgotten", missing, seq, 1))

    def _take(self, what: What, ranges: RangeSet, seq: int) -> None:
        if ranges:
            self._found.append(Outcome(what, ranges, seq))
            self.left -= ranges

    def outcomes(self) -> tuple[Outcome, ...]:
        never = self.left - RangeSet((r.start, r.stop) for o in self._found if o.what == "forgotten" for r in o.ranges)
        return (*self._found, *([Outcome("never_asked", never, None)] if never else []))
