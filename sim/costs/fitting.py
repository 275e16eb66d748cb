"""Non-negative least squares on relative errors, with a robust loss. Small problems, solved exactly.

A cost is no estimate when it is negative, and one call that the machine interrupted must not raise all others. So:
weights 1/cost^2 (an error of 5 % counts the same on a decode and on a prefill), Huber's loss on the relative error
(Huber 1964: quadratic below 1.345 robust standard deviations, linear above), rates of at least 0. With at most twelve
terms every set of terms that may be positive is tried, which is the exact solution without a solver.
"""

from __future__ import annotations

from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["Floats", "fit", "nonnegative"]

Floats = npt.NDArray[np.float64]

_HUBER: Final = 1.345
_ROUNDS: Final = 12
_MOST_TERMS: Final = 12


def nonnegative(gram: Floats, moment: Floats) -> Floats:
    """x >= 0 that minimises x'Gx - 2m'x, for G `[k, k]` positive semidefinite, m `[k]`.

    Among equals the one with fewest terms, then of the earlier terms. Raises ValueError for more than 12 terms.
    """
    k = len(moment)
    if k > _MOST_TERMS:
        raise ValueError(f"{k} terms; the exact search is for at most {_MOST_TERMS}")
    best, least = np.zeros(k), 0.0
    tolerance = 1e-12 * (float(np.abs(moment).max(initial=0.0)) + 1e-300)
    for size in range(1, k + 1):
        for chosen in combinations(range(k), size):
            at = list(chosen)
            part = gram[np.ix_(at, at)]
            if np.linalg.cond(part) > 1e10:
                continue
            rates = np.linalg.solve(part, moment[at])
            value = -float(rates @ moment[at])
            if (rates >= 0).all() and value < least - tolerance:
                least, best = value, np.zeros(k)
                best[at] = rates
    return best


def fit(counts: Floats, elapsed: Floats) -> Floats:
    """Rates `[k]`, at least 0, for `counts` `[n, k]` and `elapsed` `[n]` ns: elapsed ~ counts @ rates.

    Columns that are 0 throughout get a rate of 0; of columns that say the same, the first has all of it. Raises
    ValueError for shapes that do not fit, no rows, and numbers that are negative or not finite.
    """
    n, k = counts.shape
    if elapsed.shape != (n,) or not n:
        raise ValueError(f"{elapsed.shape} times for counts of shape {counts.shape}")
    if not all(np.isfinite(numbers).all() and (numbers >= 0).all() for numbers in (counts, elapsed)):
        raise ValueError("a time or a count is negative or not finite")
    there = np.flatnonzero(counts.any(axis=0))
    floor = max(1.0, float(np.median(elapsed)) * 1e-2)
    scale = counts[:, there].max(axis=0)
    x = counts[:, there] / scale
    rates = np.zeros(len(there))
    weights: Floats = 1.0 / np.maximum(elapsed, floor) ** 2
    for _ in range(_ROUNDS):
        weighted = x * weights[:, None]
        rates = nonnegative(x.T @ weighted, weighted.T @ elapsed)
        predicted = x @ rates
        relative: Floats = (elapsed - predicted) / np.maximum(predicted, floor)
        spread = 1.4826 * float(np.median(np.abs(relative))) + 1e-9
        weights = np.minimum(1.0, _HUBER * spread / np.maximum(np.abs(relative), 1e-300))
        weights = weights / np.maximum(predicted, floor) ** 2
    out = np.zeros(k)
    out[there] = rates / scale
    return out
