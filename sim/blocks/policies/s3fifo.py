"""S3-FIFO (Yang, Zhang, Qiu, Yue and Vinayak 2023): a small queue on probation, a main one, and ghosts."""

from __future__ import annotations

from collections import OrderedDict, deque

__all__ = ["S3Fifo"]

_MOST_USES = 3
_USES_TO_MAIN = 2


class S3Fifo:
    """A tenth of the budget is the small queue's; ghosts are as many as the main queue holds blocks.

    Until the first eviction, what finds the small queue full goes to the main one: there is room for it.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._small_size = max(1, budget // 10)
        self._most_ghosts = budget - self._small_size
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._uses: dict[int, int] = {}
        """Uses after the first, of what is held."""
        self._evicted = False
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def access(self, block: int) -> bool:
        uses = self._uses.get(block)
        if uses is not None:
            self._uses[block] = min(uses + 1, _MOST_USES)
            return True
        returns = block in self._ghosts
        if returns:
            del self._ghosts[block]
        while len(self._uses) >= self._budget:
            self._evict()
        spills = not self._evicted and len(self._small) >= self._small_size
        (self._main if returns or spills else self._small).append(block)
        self._uses[block] = 0
        return False

    def _evict(self) -> None:
        self._evicted = True
        if len(self._small) >= self._small_size or not self._main:
            self._evict_small()
        else:
            self._evict_main()

    def _evict_small(self) -> None:
        """What was used again moves to the main queue, up to the first that was not. May evict nothing."""
        while self._small:
            block = self._small.popleft()
            if self._uses[block] < _USES_TO_MAIN:
                del self._uses[block]
                self._remember(block)
                return
            self._uses[block] = 0
            self._main.append(block)

    def _evict_main(self) -> None:
        while self._main:
            block = self._main.popleft()
            uses = self._uses[block]
            if not uses:
                del self._uses[block]
                return
            self._uses[block] = uses - 1
            self._main.append(block)

    def _remember(self, block: int) -> None:
        if self._most_ghosts:
            if len(self._ghosts) == self._most_ghosts:
                self._ghosts.popitem(last=False)
            self._ghosts[block] = None

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def __len__(self) -> int:
        return len(self._uses)
