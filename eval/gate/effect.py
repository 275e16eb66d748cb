"""How much less time the optimised turns take, as a share, with an interval: paired, conversation by conversation.

Turns of one conversation are not independent of each other (they share a text), conversations are. So the unit is the
conversation: the logarithm of the ratio of its two sums of turn times, whose mean has a Student interval. On the scale
of the logarithm what halves and what doubles the time weigh the same, and noise that multiplies (a busy machine slows
both arms down by a factor) is plain addition.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from kvtape.eval.intervals import STUDENT, student

__all__ = ["INTERVAL", "LEAST_CONVERSATIONS", "Effect", "effect_of"]

LEAST_CONVERSATIONS = 4
"""Fewer say nothing of how much conversations differ: no interval."""

INTERVAL = f"{STUDENT}: logarithm of optimised / plain time, a value for each conversation"


@dataclass(frozen=True, slots=True)
class Effect:
    """Share of the time that is saved: 0.2 is a fifth less, negative is more time. `low` and `high`: its interval.

    Both are nan where `conversations` are too few for one.
    """

    saved: float
    low: float
    high: float
    conversations: int

    def beyond(self, margin: float) -> bool:
        """Whether the whole interval saves at least `margin`; never without an interval."""
        return self.low >= margin

    @property
    def is_loss(self) -> bool:
        """Whether the whole interval costs time."""
        return self.high < 0


def effect_of(times: Iterable[tuple[int, int, int]]) -> Effect:
    """From `(conversation, plain, optimised)` of each turn; times of any one unit, above 0 in sum.

    Raises ValueError for a conversation that took no time at all, or no turns.
    """
    plain: defaultdict[int, int] = defaultdict(int)
    optimised: defaultdict[int, int] = defaultdict(int)
    for conversation, one, other in times:
        plain[conversation] += one
        optimised[conversation] += other
    timeless = [c for c in plain if plain[c] <= 0 or optimised[c] <= 0]
    if timeless:
        raise ValueError(f"conversation {timeless[0]} took no time: there is nothing to compare")
    mean, low, high = student([math.log(optimised[c] / plain[c]) for c in plain])
    if len(plain) < LEAST_CONVERSATIONS:
        low = high = math.nan
    return Effect(-math.expm1(mean), -math.expm1(high), -math.expm1(low), len(plain))
