"""From a window to the spans and the budget that a plan takes. All sizes in tokens."""

from __future__ import annotations

from dataclasses import dataclass

from kvtape.planner.plan_errors import BadBudget

__all__ = ["DerivedBudget", "derive_budget"]


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
