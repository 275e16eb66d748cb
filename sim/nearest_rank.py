"""Quantiles by nearest rank: the smallest value that at least such a share of all does not exceed. It occurred."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Final

__all__ = ["MEDIAN", "P95", "nearest_rank"]

MEDIAN: Final = Fraction(1, 2)
P95: Final = Fraction(95, 100)


def nearest_rank(share: Fraction, n: int) -> int:
    """Index into n values in rising order, n at least 1; exact, 0 <= share <= 1."""
    return max(1, ceil(share * n)) - 1
