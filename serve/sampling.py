"""Choosing the next token from logits, repeatably: one seeded generator a turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvtape.serve.requests import Sampling

__all__ = ["Sampler", "most_likely"]

Floats = npt.NDArray[np.float32]

_FIRST_LOOK = 512
"""Tokens among which the nucleus is looked for first: to sort a vocabulary of 150,000 takes 20 ms."""


class Sampler:
    """Greedy at temperature 0; else the nucleus of `top_p` of the tempered distribution, drawn from `seed`.

    Nucleus: the fewest most likely tokens whose probabilities reach `top_p` (Holtzman et al., 2020, arXiv:1904.09751);
    ties go to the smaller id, so that the same logits and seed always give the same token.
    """

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self._temperature = sampling.temperature
        self._top_p = sampling.top_p
        self._draw = np.random.Generator(np.random.PCG64(seed))

    def choose(self, logits: Floats) -> int:
        """The next token from float32 logits `[n_vocab]`."""
        if self._temperature <= 0:
            return int(logits.argmax())
        # The largest is taken off first: the smallest temperatures would make infinities of both.
        below = logits.astype(np.float64) - float(logits.max())
        with np.errstate(over="ignore"):
            weights = np.exp(below / self._temperature)
        kept, running = self._nucleus(weights)
        place = int(np.searchsorted(running, self._draw.random() * running[-1], side="right"))
        return int(kept[min(place, len(kept) - 1)])

    def _nucleus(self, weights: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """Ids that may be drawn, and the running sum of their weights."""
        if self._top_p >= 1:
            return np.arange(len(weights)), np.cumsum(weights)
        wanted = self._top_p * weights.sum()
        n = _FIRST_LOOK
        while True:
            order = most_likely(weights, n)
            running = np.cumsum(weights[order])
            if running[-1] >= wanted or len(order) == len(weights):
                last = min(int(np.searchsorted(running, wanted)), len(order) - 1)
                return order[: last + 1], running[: last + 1]
            n *= 8


def most_likely(weights: npt.NDArray[np.floating[Any]], n: int) -> npt.NDArray[np.intp]:
    """Ids of the `n` largest weights, and of those equal to the last: descending, ties by id. Without sorting all."""
    if n < len(weights):
        least = np.partition(weights, len(weights) - n)[len(weights) - n]
        found = np.flatnonzero(weights >= least)
    else:
        found = np.arange(len(weights))
    return found[np.argsort(-weights[found], kind="stable")]
