"""95 % intervals: of a share (Wilson), and of a mean over neighbouring tokens (batch means)."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["BATCH_MEANS", "WILSON", "Z_95", "batch_means", "wilson"]

Z_95 = 1.959963984540054
"""The 97.5 % point of the standard normal distribution."""

WILSON = "Wilson score, 95 %"
BATCH_MEANS = "batch means, 95 %: normal, over means of {n} tokens that follow each other"


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
