"""LRU as a policy of a user's own: what is measured beside libcachesim's Python hooks, which do the same."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["OwnLru"]


class OwnLru:
    """Evicts what was used least recently."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held: OrderedDict[int, None] = OrderedDict()

    def access(self, block: int) -> bool:
        if block in self.held:
            self.held.move_to_end(block)
            return True
        if len(self.held) == self.budget:
            self.held.popitem(last=False)
        self.held[block] = None
        return False

    def __contains__(self, block: int) -> bool:
        return block in self.held

    def __len__(self) -> int:
        return len(self.held)
