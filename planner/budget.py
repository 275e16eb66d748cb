"""From a window or a ratio to the spans and budgets that a plan takes. All sizes in tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from kvtape.planner.plan_errors import BadBudget

__all__ = ["DerivedBudget", "derive_budget", "ratio_budget"]


@dataclass(frozen=True, slots=True)
class DerivedBudget:
    """Spans for a window. Not `valid`: the window is too small to evict from, and all of it is `recent`."""

    sink: int
    recent: int
    max_tokens: int
    valid: bool


def derive_budget(window: int, swa: int = 0, block: int = 1) -> DerivedBudget:
    """Split a context `window` into sink, recent and the most that may stay, in whole blocks.

    `swa` is the model's sliding window, 0 for none; it counts when it is smaller than `window` or when `window`
    is not given (0). A sixteenth is sink, a quarter recent, each at least one block. Below four blocks the split
    is not valid. Raises BadBudget for a block below 1.
    """
    if block < 1:
        raise BadBudget(f"block {block}: needs at least 1 token")
    if swa > 0 and (window <= 0 or swa < window):
        window = swa
    window = max(0, window)
    if window < 4 * block:
        return DerivedBudget(sink=0, recent=window, max_tokens=window, valid=False)
    sink = _align_up(window // 16, block)
    recent = _align_up(window // 4, block)
    # All three are whole blocks, so "not larger than sink + recent" and "less than one block larger" are one.
    most = max(window // block * block, sink + recent + block)
    return DerivedBudget(sink=sink, recent=recent, max_tokens=most, valid=True)


def _align_up(tokens: int, block: int) -> int:
    """Up to a whole number of blocks, at least one."""
    return max(1, -(-tokens // block)) * block


def ratio_budget(n_tokens: int, removed: float) -> int:
    """The budget that is left when the share `removed` of `n_tokens` goes, rounded down.

    The share is taken as the decimal it is written as: a tenth of 10 tokens is 1, though 10 * (1 - 0.9) is below
    1 in binary. Raises BadBudget when nothing would be left, and for a share outside [0, 1).
    """
    if not (math.isfinite(removed) and 0 <= removed < 1):
        raise BadBudget(f"removed share {removed} is not in [0, 1)")
    budget = math.floor(n_tokens * (1 - Fraction(repr(removed))))
    if budget < 1:
        raise BadBudget(f"removing {removed} of {n_tokens} tokens leaves a budget that rounds to zero")
    return budget
