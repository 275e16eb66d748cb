"""Which part of each block a plan may evict: all of it, none, or with `split` the middle between the borders."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtape.planner.plan_errors import BadSpan
from kvtape.planner.table import BlockTable, Bools, Ints

__all__ = ["Free", "free_parts"]


@dataclass(frozen=True, slots=True)
class Free:
    """Per block of a table: `[starts, stops)` may go where `mask` is set; `lengths` are its tokens there, else 0."""

    mask: Bools
    starts: Ints
    stops: Ints
    lengths: Ints

    @property
    def n_tokens(self) -> int:
        return int(self.lengths.sum())


def free_parts(table: BlockTable, sink: int, recent: int, split: bool) -> Free:
    """What neither the blocks themselves nor `[0, sink)` and `[end - recent, end)` protect. Raises BadSpan."""
    if sink < 0 or recent < 0:
        raise BadSpan(f"sink {sink} and recent {recent} must not be negative")
    starts = np.maximum(table.starts, min(sink, table.end))
    stops = np.minimum(table.stops, max(0, table.end - recent))
    mask = ~table.own & (starts < stops)
    if not split:
        # A block that straddles a border is kept whole.
        mask &= (starts == table.starts) & (stops == table.stops)
    return Free(mask, starts, stops, np.where(mask, stops - starts, 0))
