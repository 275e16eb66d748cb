"""How far two runs of one tape kept the same: a policy live, and simulated from recorded attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.planner.events import Event, Op
from kvtape.planner.ranges import RangeSet
from kvtape.planner.residency import apply
from kvtape.planner.residency_state import ResidencyState

__all__ = ["Agreement", "agreement"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """`shares`: at each tape length at which both runs computed on, from the first eviction on, the share of the tokens
    that either had resident and both had (Jaccard). `first`: that tape length at which they first differ.

    `equal`: until then, and including the first eviction of both, nothing differed.
    """

    shares: tuple[float, ...]
    first: int | None
    equal: bool

    @property
    def mean(self) -> float:
        """1 where nothing was evicted."""
        return sum(self.shares) / len(self.shares) if self.shares else 1.0


def agreement(one: Sequence[Event], other: Sequence[Event]) -> Agreement:
    """Of two runs in which the tape only grows, token by token the same."""
    mine, its = _before_each(one), _before_each(other)
    shares: list[float] = []
    first, equal = None, True
    for length in sorted(mine.keys() & its.keys()):
        a, b = mine[length], its[length]
        if a.n_tokens == b.n_tokens == length:
            continue
        equal = equal and (bool(shares) or a == b)
        first = length if first is None and a != b else first
        shares.append((a & b).n_tokens / (a | b).n_tokens)
    return Agreement(tuple(shares), first, equal)


def _before_each(events: Sequence[Event]) -> dict[int, RangeSet]:
    """What was resident before each event that computed, by where on the tape it began."""
    state, found = ResidencyState(), dict[int, RangeSet]()
    for event in events:
        if event.op in (Op.PREFILL, Op.DECODE):
            found[event.start or 0] = state.resident
        state = apply(state, event)
    return found
