"""SIEVE (Zhang, Yang, Yue, Vigfusson and Rashmi 2024): a FIFO whose hand spares what was used since it last came by."""

from __future__ import annotations

__all__ = ["Sieve"]

_NONE = -1


class Sieve:
    """The queue is a linked list in two dictionaries: `newer` and `older` neighbour of each block."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._visited: dict[int, bool] = {}
        self._newer: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._head = self._tail = self._hand = _NONE

    def access(self, block: int) -> bool:
        if block in self._visited:
            self._visited[block] = True
            return True
        if len(self._visited) == self._budget:
            self._evict()
        self._newer[block], self._older[block] = _NONE, self._head
        if self._head != _NONE:
            self._newer[self._head] = block
        else:
            self._tail = block
        self._head = block
        self._visited[block] = False
        return False

    def _evict(self) -> None:
        """The hand goes from old to new and starts anew at the oldest."""
        at = self._hand if self._hand != _NONE else self._tail
        while self._visited[at]:
            self._visited[at] = False
            at = self._newer[at] if self._newer[at] != _NONE else self._tail
        newer, older = self._newer.pop(at), self._older.pop(at)
        del self._visited[at]
        self._hand = newer
        if newer != _NONE:
            self._older[newer] = older
        else:
            self._head = older
        if older != _NONE:
            self._newer[older] = newer
        else:
            self._tail = newer

    def __contains__(self, block: int) -> bool:
        return block in self._visited

    def __len__(self) -> int:
        return len(self._visited)
