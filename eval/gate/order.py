"""Which arm goes first: drawn from a seed, in blocks of two turns that balance each other (ABBA or BAAB)."""

from __future__ import annotations

from collections.abc import Iterator

from kvtape.eval.filler import Draws

__all__ = ["plain_first"]

_STREAM = 7


def plain_first(seed: int) -> Iterator[bool]:
    """For turn after turn, without end; of turns 2k and 2k + 1 exactly one has the plain arm first.

    What drifts slowly, like a machine that warms up, then weighs on both arms alike; what comes at a fixed beat cannot
    always meet the same arm.
    """
    draws = Draws(seed, stream=_STREAM)
    while True:
        first = draws.below(2) == 0
        yield first
        yield not first
