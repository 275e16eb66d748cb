"""The resident blocks of a session as the table that plans read, carried along from plan to plan.

A plan every few tokens over a long context must cost what has changed since the plan before, not what is there: the
blocks that came, went or were changed are taken out of the table and put in, and nothing is read or sorted again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtape.planner.blocks import Block
from kvtape.planner.ranges import RangeSet
from kvtape.planner.table import BlockTable

__all__ = ["ResidentTable"]

_REBUILD = 4
"""When more than one block in so many has changed, the table is built anew: that costs less."""


class ResidentTable:
    """Told of every block that is made, changed or gone; `at` gives the table for the resident ranges of now."""

    def __init__(self) -> None:
        self._table = BlockTable()
        self._ranges = RangeSet()
        self._changed: dict[int, Block | None] = {}

    def note(self, block_id: int, block: Block | None) -> None:
        """The block of this id is now `block`; None when there is none any more."""
        self._changed[block_id] = block

    def forget(self) -> None:
        """Everything may have changed."""
        self._table, self._ranges, self._changed = BlockTable(), RangeSet(), {}

    def at(self, ranges: RangeSet, inside: Callable[[int, int], list[Block]]) -> BlockTable:
        """The blocks of the resident `ranges`; `inside(start, stop)` lists the blocks there. Not to be changed."""
        came, left = ranges - self._ranges, self._ranges - ranges
        changed = {b.block_id: b for r in came for b in inside(r.start, r.stop)} | self._changed
        self._ranges, self._changed = ranges, {}
        if len(changed) * _REBUILD > len(self._table):
            self._table = BlockTable(b for r in ranges for b in inside(r.start, r.stop))
            return self._table
        table = self._table
        ids = table.ids[np.isin(table.ids, np.fromiter(changed, np.int64, len(changed)))].tolist()
        for r in left:
            first, last = np.searchsorted(table.stops, r.start, side="right"), np.searchsorted(table.starts, r.stop)
            ids += table.ids[first:last].tolist()
        table.remove(ids)
        table.insert(b for b in changed.values() if b is not None and b.start in ranges)
        return table
