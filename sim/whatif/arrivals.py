"""Arrivals drawn anew from those of a log: what else the same traffic could have looked like.

The gaps between the first turns of conversations are drawn by the stationary bootstrap (Politis and Romano 1994): runs
of neighbouring gaps, of length n^(1/3) in the mean, so that bursts stay bursts. Conversations keep their order, their
tokens and, in an open loop, the distances of their turns; in a closed loop each think time is drawn from all of the
log (Efron 1979). Draws are those of Philox (Salmon et al. 2011), a generator of a key and a counter: draw number k of
a seed is the same for every point of a what-if (common random numbers), in every process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np

from kvtape.sim.world.script import Script, Turn
from kvtape.sim.world.settings import Arrivals

__all__ = ["METHOD", "has_choice", "resampled"]

METHOD: Final[dict[Arrivals, str]] = {
    "open": "gaps between conversations by the stationary bootstrap; the distances of their turns as recorded",
    "closed": "gaps between conversations by the stationary bootstrap, think times drawn from all of the log",
}

_GAPS, _THINKING = 0, 1

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def resampled(scripts: Sequence[Script], arrivals: Arrivals, seed: int, draw: int) -> tuple[Script, ...]:
    """`scripts`, in their order, at the times of draw number `draw` of `seed`; both below 2^64."""
    order = _order(scripts)
    starts = dict(zip(order, _starts(_gaps(scripts, order), seed, draw), strict=True))
    pool = _think_times(scripts)
    thinking = iter(_any_of(pool, len(pool), seed, draw) if arrivals == "closed" else pool)
    first_ns = scripts[order[0]].turns[0].at_ns if order else 0
    return tuple(
        _moved(script, first_ns + starts[i] - script.turns[0].at_ns, thinking) if i in starts else script
        for i, script in enumerate(scripts)
    )


def has_choice(scripts: Sequence[Script], arrivals: Arrivals) -> bool:
    """Whether a draw can differ from what was recorded."""
    gaps = _gaps(scripts, _order(scripts))
    return len(set(gaps)) > 1 or (arrivals == "closed" and len(set(_think_times(scripts))) > 1)


def _order(scripts: Sequence[Script]) -> list[int]:
    """Indices of those that ask for anything, by when they first do."""
    return sorted((i for i, s in enumerate(scripts) if s.turns), key=lambda i: scripts[i].turns[0].at_ns)


def _gaps(scripts: Sequence[Script], order: Sequence[int]) -> list[int]:
    times = [scripts[i].turns[0].at_ns for i in order]
    return [b - a for a, b in pairwise(times)]


def _think_times(scripts: Sequence[Script]) -> list[int]:
    return [turn.think_ns for script in scripts for turn in script.turns[1:]]


def _starts(gaps: Sequence[int], seed: int, draw: int) -> list[int]:
    """Times since the first conversation: one more than there are gaps."""
    at, starts = 0, [0]
    for i in _runs(len(gaps), seed, draw):
        at += gaps[i]
        starts.append(at)
    return starts


def _runs(n: int, seed: int, draw: int) -> list[int]:
    """n indices below n: runs that begin anywhere, go on round the end, and end after each index with one chance."""
    u = _uniform(2 * n, seed, draw, _GAPS)
    ends = 1 / max(1, round(n ** (1 / 3)))
    found: list[int] = []
    for where, whether in zip(u[:n], u[n:], strict=True):
        found.append(int(where * n) if not found or whether < ends else (found[-1] + 1) % n)
    return found


def _any_of(pool: Sequence[int], n: int, seed: int, draw: int) -> list[int]:
    return [pool[int(u * len(pool))] for u in _uniform(n, seed, draw, _THINKING)]


def _uniform(n: int, seed: int, draw: int, stream: int) -> Floats:
    """n numbers in [0, 1), from the raw words of the generator, which no version of NumPy may change."""
    key, counter = np.array([seed, draw], np.uint64), np.array([0, 0, 0, stream], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(n)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _moved(script: Script, by_ns: int, thinking: Iterator[int]) -> Script:
    turns: list[Turn] = []
    for turn in script.turns:
        think = next(thinking) if turns else turn.think_ns
        turns.append(replace(turn, at_ns=turn.at_ns + by_ns, think_ns=think))
    return replace(script, turns=tuple(turns))
