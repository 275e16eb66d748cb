"""How near a simulated run comes to the recorded one, beside how near the machine comes to itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from kvtape.planner.events import Event, Op
from kvtape.planner.residency import RESIDENCY_OPS
from kvtape.planner.scores import is_dense

__all__ = ["BAR", "Comparison", "Spread", "compare", "first_difference"]

BAR: Final = 0.05
"""The median error of a turn may be this, or 1.5 times the machine's own difference, whichever is larger."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Relative errors of `n` things: median and 95th percentile."""

    n: int
    median: float
    p95: float

    @classmethod
    def of(cls, truth: Sequence[int], other: Sequence[int]) -> Spread:
        """Of `other` against `truth`, both in ns; what took no time is left out."""
        pairs = [(t, o) for t, o in zip(truth, other, strict=True) if t > 0]
        errors = np.array([abs(o - t) / t for t, o in pairs] or [0.0])
        return cls(len(pairs), float(np.median(errors)), float(np.quantile(errors, 0.95)))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of one recorded log: `model` is the simulation against both recordings, `machine` one against the other.

    `residency`: events that change residency, all of them equal when `difference` is None.
    """

    residency: int
    difference: str | None
    operation: dict[str, tuple[Spread, Spread]]
    turn: tuple[Spread, Spread]
    total: tuple[Spread, Spread]

    @property
    def allowed(self) -> float:
        return max(BAR, 1.5 * self.turn[1].median)

    @property
    def holds(self) -> bool:
        return self.difference is None and self.turn[0].median <= self.allowed

    def to_json(self) -> dict[str, Any]:
        def pair(two: tuple[Spread, Spread]) -> dict[str, Any]:
            return {"model": asdict(two[0]), "machine": asdict(two[1])}

        return {
            "residency_events": self.residency,
            "difference": self.difference,
            "operation": {op: pair(two) for op, two in self.operation.items()},
            "turn": pair(self.turn),
            "total": pair(self.total),
            "allowed": self.allowed,
            "holds": self.holds,
        }


def compare(one: Sequence[Event], two: Sequence[Event], simulated: Sequence[Event]) -> Comparison:
    """One session, recorded twice on one machine, against its simulation.

    Times are those of the events; a turn's is from its prompt to the end of its last event.
    """
    recordings = (one, two)
    difference = first_difference(one, simulated) or first_difference(one, two)
    times = [_operations(events) for events in (one, two, simulated)]
    keys = [k for k in times[0] if k in times[1] and k in times[2]]
    operations: dict[str, tuple[Spread, Spread]] = {}
    for op in sorted({k[1] for k in keys}):
        mine = [k for k in keys if k[1] == op]
        a, b, s = ([t[k] for k in mine] for t in times)
        operations[op] = Spread.of(a + b, s + s), Spread.of(a, b)
    turns = [_turns(events) for events in (*recordings, simulated)]
    shared = sorted(turns[0].keys() & turns[1].keys() & turns[2].keys())
    a, b, s = ([t[k] for k in shared] for t in turns)
    total_a, total_b, total_s = sum(a), sum(b), sum(s)
    return Comparison(
        residency=sum(e.op in RESIDENCY_OPS for e in one),
        difference=difference,
        operation=operations,
        turn=(Spread.of(a + b, s + s), Spread.of(a, b)),
        total=(Spread.of([total_a, total_b], [total_s, total_s]), Spread.of([total_a], [total_b])),
    )


def first_difference(one: Sequence[Event], other: Sequence[Event]) -> str | None:
    """Where two runs of a session first hold different tokens, as text; None when they never do."""
    mine, its = ([_residency(e) for e in events if e.op in RESIDENCY_OPS] for events in (one, other))
    for i, (a, b) in enumerate(zip(mine, its, strict=False)):
        if a != b:
            return f"residency-changing event {i}: {a} against {b}"
    return None if len(mine) == len(its) else f"{len(mine)} residency-changing events against {len(its)}"


def _residency(event: Event) -> tuple[Any, ...]:
    return str(event.op), event.start, event.stop, event.resident_tokens, event.resident_digest, event.layout_digest


def _operations(events: Sequence[Event]) -> dict[tuple[int, str], int]:
    """By number among the session's own events: a recording may have a dense pass between them."""
    timed = RESIDENCY_OPS | {Op.SNAPSHOT, Op.SCORE}
    own = enumerate(e for e in events if not is_dense(e))
    return {(i, str(e.op)): e.elapsed_ns for i, e in own if e.op in timed and e.elapsed_ns is not None}


def _turns(events: Sequence[Event]) -> dict[int, int]:
    """By turn, from its prompt to the end of its last event but the close."""
    began: dict[int, int] = {}
    ended: dict[int, int] = {}
    for e in events:
        if e.turn and e.op not in (Op.CLOSE, Op.FATAL):
            began.setdefault(e.turn, e.at_ns)
            ended[e.turn] = max(ended.get(e.turn, 0), e.at_ns + (e.elapsed_ns or 0))
    return {turn: ended[turn] - at for turn, at in began.items()}
