"""FIFO and LRU. The curve has quicker ways to their hit rates; these are what those are held against."""

from __future__ import annotations

from collections import OrderedDict, deque

__all__ = ["Fifo", "Lru"]


class Fifo:
    """Evicts what was admitted first."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._queue: deque[int] = deque()
        self._there: set[int] = set()

    def access(self, block: int) -> bool:
        if block in self._there:
            return True
        if len(self._there) == self._budget:
            self._there.remove(self._queue.popleft())
        self._queue.append(block)
        self._there.add(block)
        return False

    def __contains__(self, block: int) -> bool:
        return block in self._there

    def __len__(self) -> int:
        return len(self._there)


class Lru:
    """Evicts what was used least recently."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._by_use: OrderedDict[int, None] = OrderedDict()

    def access(self, block: int) -> bool:
        if block in self._by_use:
            self._by_use.move_to_end(block)
            return True
        if len(self._by_use) == self._budget:
            self._by_use.popitem(last=False)
        self._by_use[block] = None
        return False

    def __contains__(self, block: int) -> bool:
        return block in self._by_use

    def __len__(self) -> int:
        return len(self._by_use)
