"""A figure over several draws of the arrivals: its median, and the interval that 95 of 100 draws lie in.

The interval is the percentile interval of the bootstrap (Efron and Tibshirani 1993, chapter 13), by nearest rank: an
end is a value that occurred, so integers stay integers. With fewer than 40 draws it is from the least to the most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from kvtape.sim.nearest_rank import MEDIAN, nearest_rank

__all__ = ["RULE", "Number", "interval", "median"]

Number = int | float

RULE: Final = "median, and 2.5 to 97.5 % of the draws by nearest rank"

_LOW, _HIGH = Fraction(25, 1000), Fraction(975, 1000)


def median(values: Sequence[Number | None]) -> Number | None:
    """None where a draw has no such figure."""
    there = [v for v in values if v is not None]
    return _rank(there, MEDIAN) if len(there) == len(values) and there else None


def interval(values: Sequence[Number | None]) -> dict[str, Number] | None:
    """`low`, `high` and the `mean`; None where a draw has no such figure."""
    there = [v for v in values if v is not None]
    if len(there) < len(values) or not there:
        return None
    return {"low": _rank(there, _LOW), "high": _rank(there, _HIGH), "mean": math.fsum(there) / len(there)}


def _rank(values: Sequence[Number], share: Fraction) -> Number:
    return sorted(values)[nearest_rank(share, len(values))]
