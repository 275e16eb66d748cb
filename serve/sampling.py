"""Choosing the next token from logits, repeatably: one seeded generator a turn."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtape.serve.requests import Sampling

__all__ = ["Sampler", "log_probabilities"]

Floats = npt.NDArray[np.float32]


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
        scaled = logits.astype(np.float64) / self._temperature
        weights = np.exp(scaled - scaled.max())
        order = np.argsort(-weights, kind="stable")
        running = np.cumsum(weights[order])
        kept = order
        if self._top_p < 1:
            kept = order[: int(np.searchsorted(running, self._top_p * running[-1])) + 1]
            kept = kept[: len(order)]
        mass = running[len(kept) - 1]
        place = int(np.searchsorted(running[: len(kept)], self._draw.random() * mass, side="right"))
        return int(kept[min(place, len(kept) - 1)])


def log_probabilities(logits: Floats) -> npt.NDArray[np.float64]:
    """Natural log-probabilities `[n_vocab]` of the untempered distribution."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
