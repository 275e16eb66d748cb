"""Rank correlations of paired figures, and their bootstrap intervals. No ties are assumed away."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ROUNDS = 5000


def ranks(values: Floats) -> Floats:
    """1 for the least; equal values share the mean of their ranks."""
    found, where = np.unique(values, return_inverse=True)
    counts = np.bincount(where, minlength=len(found))
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[where], dtype=np.float64)


def spearman(x: Floats, y: Floats) -> float:
    """Pearson's correlation of the ranks; NaN where one of the two does not vary."""
    a, b = ranks(x), ranks(y)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else float("nan")


def kendall(x: Floats, y: Floats) -> float:
    """Kendall's tau-b (1945): concordant less discordant pairs, over those that are tied in neither."""
    upper = np.triu_indices(len(x), 1)
    dx, dy = (np.sign(np.subtract.outer(v, v))[upper] for v in (x, y))
    scale = float(np.sqrt(np.abs(dx).sum() * np.abs(dy).sum()))
    return float(dx @ dy) / scale if scale else float("nan")


def interval(of: Callable[[Floats, Floats], float], x: Floats, y: Floats, seed: int = 0) -> tuple[float, float]:
    """95 % percentile bootstrap over the pairs (Efron 1979), seeded."""
    draw = np.random.default_rng(seed)
    found = [of(x[i], y[i]) for i in draw.integers(0, len(x), (ROUNDS, len(x)))]
    low, high = np.nanpercentile(found, [2.5, 97.5])
    return float(low), float(high)
