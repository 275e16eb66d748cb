"""95 % intervals: of a share (Wilson), of a mean over neighbouring tokens (batch means), of a mean of few (Student)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

__all__ = ["BATCH_MEANS", "STUDENT", "WILSON", "Z_95", "batch_means", "student", "t_95", "wilson"]

Z_95 = 1.959963984540054
"""The 97.5 % point of the standard normal distribution."""

WILSON = "Wilson score, 95 %"
BATCH_MEANS = "batch means, 95 %: normal, over means of {n} tokens that follow each other"
STUDENT = "Student's t, 95 %, {n} values"


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Lower and upper end for `hits` of `n` (Wilson 1927); (0, 1) when n is 0."""
    if not 0 <= hits <= n:
        raise ValueError(f"{hits} of {n}")
    if n == 0:
        return 0.0, 1.0
    share, z2 = hits / n, Z_95**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # At the ends the two terms are equal, and only rounding would keep them apart.
    return (0.0 if hits == 0 else middle - half), (1.0 if hits == n else middle + half)


def batch_means(values: Sequence[float], batch: int) -> tuple[float, float, float]:
    """Mean of `values` and its interval from the means of whole batches: neighbouring tokens are not independent.

    A rest shorter than a batch counts in the mean only. Fewer than two batches give no interval: (mean, nan, nan).
    """
    if not values:
        raise ValueError("no values")
    mean = math.fsum(values) / len(values)
    means = [math.fsum(values[i : i + batch]) / batch for i in range(0, len(values) - batch + 1, batch)]
    if len(means) < 2:
        return mean, math.nan, math.nan
    centre = math.fsum(means) / len(means)
    variance = math.fsum((m - centre) ** 2 for m in means) / (len(means) - 1)
    half = Z_95 * math.sqrt(variance / len(means))
    return mean, mean - half, mean + half


def student(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of independent `values` and its interval; fewer than two give no interval: (mean, nan, nan)."""
    if not values:
        raise ValueError("no values")
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, math.nan, math.nan
    half = t_95(n - 1) * math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return mean, mean - half, mean + half


@cache
def t_95(freedom: int) -> float:
    """The 97.5 % point of Student's distribution with `freedom` >= 1 degrees of freedom."""
    if freedom < 1:
        raise ValueError(f"{freedom} degrees of freedom")
    low, high = Z_95, 13.0  # one degree of freedom has 12.706
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _t_inside(middle, freedom) < 0.95 else (low, middle)
    return high


def _t_inside(t: float, freedom: int) -> float:
    """P(-t < T < t). Finite sums for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    factor = math.cos(angle) if odd else 1.0
    terms: list[float] = []
    for k in range(odd + 1, freedom, 2):
        terms.append(factor)
        factor *= math.cos(angle) ** 2 * k / (k + 1)
    inside = math.sin(angle) * math.fsum(terms)
    return 2 / math.pi * (angle + inside) if odd else inside
