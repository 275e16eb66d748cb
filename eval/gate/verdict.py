"""Through, or not here: what A/B turns and the quality smoke come to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtape.eval.gate.effect import LEAST_CONVERSATIONS, Effect, effect_of
from kvtape.eval.gate.smoke import Smoke
from kvtape.eval.gate.turns import Turn

__all__ = ["MARGIN", "NOT_HERE", "THROUGH", "Outcome", "judge"]

THROUGH = "through"
NOT_HERE = "not here"

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
    """The verdict, with everything that speaks against it.

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
    effect = cpu if by == "cpu" else wall
    problems = [*_problems(turns, parted, used, smoke), *_slow(effect, wall, margin)]
    return Outcome(
        verdict=NOT_HERE if problems else THROUGH,
        reason="; ".join(problems) or f"saves {_interval(effect)} of the turn time, at least {_share(margin)}",
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


def _problems(turns: Sequence[Turn], parted: int, used: int, smoke: Smoke) -> Iterator[str]:
    if parted:
        first = next(t for t in turns if t.parted)
        where = f"first in turn {first.number} of conversation {first.conversation}"
        yield f"other tokens were generated in {parted} of {len(turns)} turns, {where}"
    if not used:
        yield f"it never came into play in {len(turns)} turns"
    if not smoke.used:
        yield "it never came into play in the quality smoke, which therefore says nothing"
    elif smoke.problem:
        yield smoke.problem


def _slow(effect: Effect, wall: Effect, margin: float) -> Iterator[str]:
    if effect.conversations < LEAST_CONVERSATIONS:
        yield f"{effect.conversations} conversations give no interval; at least {LEAST_CONVERSATIONS} do"
    elif effect.is_loss:
        yield f"costs {_interval(effect, -1)} more time"
    elif not effect.beyond(margin):
        yield f"{_doubtful(effect)}, and the whole interval must be at least {_share(margin)}"
    elif wall.is_loss:
        yield f"CPU time saves {_interval(effect)}, but by the wall clock it costs {_interval(wall, -1)} more"


def _doubtful(effect: Effect) -> str:
    """What the mean says, where the interval around it says less: the words of a gain are never put before a loss."""
    if effect.saved >= 0:
        return f"saves {_interval(effect)}"
    bounds = f"[{100 * effect.low:.1f}, {100 * effect.high:.1f}]"
    return f"costs {-100 * effect.saved:.1f} % more time, the saving is in {bounds}"


def _interval(effect: Effect, sign: int = 1) -> str:
    """What is saved or, with `sign` -1, what it costs, in per cent with its interval."""
    low, high = sorted((sign * effect.low, sign * effect.high))
    return f"{100 * sign * effect.saved:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def _share(margin: float) -> str:
    return f"{100 * margin:g} %"
