"""LRU under each rule of what happens to a request in flight: from stack positions to the budgets that hit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtape.sim.blocks.accesses import Accesses
from kvtape.sim.blocks.block_trace import Ints
from kvtape.sim.blocks.recency import NEVER, held_positions, stack_distances

__all__ = ["least_budgets", "rooms_short_by_one"]


def least_budgets(a: Accesses, *, held: bool) -> Ints:
    """The smallest budget at which LRU finds each access; NEVER where none does. int64 [accesses].

    `held` wants the accesses root last: a block then stands above those behind it, which is how they go first.
    """
    positions = held_positions(a) if held else stack_distances(a)
    positions[positions != NEVER] += 1
    return positions


def rooms_short_by_one(a: Accesses, least: Ints, budget: int) -> npt.NDArray[np.bool_]:
    """Which requests find a cache with one place empty, where an overlong request leaves one. bool [requests].

    A request of more blocks than the budget fills the cache, gives up its own last block for the next one, and ends
    there, since nothing can stand behind a block that is gone; unless all that the cache held was its own prefix. The
    place is empty until a request that fits brings a block of its own.
    """
    lengths = np.diff(a.starts)
    overlong = lengths > budget
    if not overlong.any():
        return np.zeros(len(lengths), bool)
    in_full, in_short = (np.add.reduceat(least <= room, a.starts[:-1]) for room in (budget, budget - 1))
    leaves_short = overlong & (in_full < budget)
    fills_up = ~overlong & (in_short < lengths)
    # What a request leaves is decided by the last one before it that leaves the same whatever it found.
    decides = leaves_short | fills_up
    last = np.maximum.accumulate(np.where(decides, np.arange(len(lengths)), -1))
    found = np.concatenate([np.full(1, -1), last[:-1]])
    short: npt.NDArray[np.bool_] = (found >= 0) & leaves_short[found]
    return short
