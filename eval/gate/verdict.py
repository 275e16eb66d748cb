"""Through, or not here: what A/B turns and the quality smoke come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.eval.gate.effect import LEAST_CONVERSATIONS, Effect, effect_of
from kvtape.eval.gate.smoke import Smoke
from kvtape.eval.gate.turns import Turn

__all__ = ["MARGIN", "NOT_HERE", "THROUGH", "Outcome", "judge"]

THROUGH, NOT_HERE = "through", "not here"

MARGIN = 0.05
"""Materially better: the whole interval saves at least this share of the turn time. Less is not worth a second path."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`decided_by` is `cpu` or `wall`; `why_decided` says why that one. `reason`: why not, or what was shown."""

    verdict: str
    reason: str
    decided_by: str
    why_decided: str
    wall: Effect
    cpu: Effect
    smoke: Smoke
    turns: int
    parted: int
    used: int
    margin: float

    @property
    def through(self) -> bool:
        return self.verdict == THROUGH

    @property
    def effect(self) -> Effect:
        """The one that decides."""
        return self.cpu if self.decided_by == "cpu" else self.wall


def judge(turns: Sequence[Turn], smoke: Smoke, *, threads: int, margin: float = MARGIN) -> Outcome:
    """The verdict. Quality comes first, then whether the optimisation came into play at all, then time.

    With one computing thread the CPU time decides: on an idle machine it is the turn time, and on a busy one it leaves
    out what others took. The wall clock may still object, by an interval that is a loss as a whole. With several
    threads CPU time is not what anybody waits for, and the wall clock decides alone.
    """
    wall = effect_of((t.conversation, t.plain.wall_ns, t.optimised.wall_ns) for t in turns)
    cpu = effect_of((t.conversation, t.plain.cpu_ns, t.optimised.cpu_ns) for t in turns)
    by, why = ("cpu", "one thread computes: its CPU time is the turn time without what others took of the machine")
    if threads > 1:
        by, why = ("wall", f"{threads} threads compute: their CPU time together is not what anybody waits for")
    parted, used = sum(t.parted for t in turns), sum(t.used for t in turns)
    problem = _problem(turns, parted, used, smoke) or _slow(cpu if by == "cpu" else wall, wall, margin)
    effect = cpu if by == "cpu" else wall
    return Outcome(
        verdict=NOT_HERE if problem else THROUGH,
        reason=problem or f"saves {_interval(effect)} of the turn time, at least {_share(margin)}",
        decided_by=by,
        why_decided=why,
        wall=wall,
        cpu=cpu,
        smoke=smoke,
        turns=len(turns),
        parted=parted,
        used=used,
        margin=margin,
    )


def _problem(turns: Sequence[Turn], parted: int, used: int, smoke: Smoke) -> str | None:
    if parted:
        first = next(t for t in turns if t.parted)
        where = f"first in turn {first.number} of conversation {first.conversation}"
        return f"other tokens were generated in {parted} of {len(turns)} turns, {where}"
    if not used:
        return f"it never came into play in {len(turns)} turns"
    if not smoke.used:
        return "it never came into play in the quality smoke, which therefore says nothing"
    return smoke.problem


def _slow(effect: Effect, wall: Effect, margin: float) -> str | None:
    if effect.conversations < LEAST_CONVERSATIONS:
        return f"{effect.conversations} conversations give no interval; at least {LEAST_CONVERSATIONS} do"
    if effect.is_loss:
        return f"costs time: saves {_interval(effect)}"
    if not effect.beyond(margin):
        return f"saves {_interval(effect)}, which is not at least {_share(margin)} as a whole"
    if wall.is_loss:
        return f"CPU time saves {_interval(effect)}, but the wall clock shows a loss: {_interval(wall)}"
    return None


def _interval(effect: Effect) -> str:
    return f"{100 * effect.saved:.1f} % [{100 * effect.low:.1f}, {100 * effect.high:.1f}]"


def _share(margin: float) -> str:
    return f"{100 * margin:g} %"
