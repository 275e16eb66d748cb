"""LFU: evicts what was used least often; of those, what reached that count first."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["Lfu"]


class Lfu:
    """Counts uses of what is resident; an evicted block is forgotten. Constant time (Shah, Mitra and Matani 2010)."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._uses: dict[int, int] = {}
        self._by_uses: dict[int, OrderedDict[int, None]] = {1: OrderedDict()}
        self._least = 1

    def access(self, block: int) -> bool:
        uses = self._uses.get(block)
        if uses is not None:
            self._used_again(block, uses)
            return True
        if len(self._uses) == self._budget:
            victim, _ = self._by_uses[self._least].popitem(last=False)
            del self._uses[victim]
        self._uses[block] = self._least = 1
        self._by_uses[1][block] = None
        return False

    def _used_again(self, block: int, uses: int) -> None:
        level = self._by_uses[uses]
        del level[block]
        if not level and uses == self._least:
            self._least = uses + 1
        self._uses[block] = uses + 1
        self._by_uses.setdefault(uses + 1, OrderedDict())[block] = None

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def __len__(self) -> int:
        return len(self._uses)
