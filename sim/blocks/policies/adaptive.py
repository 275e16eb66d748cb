"""ARC (Megiddo and Modha 2003): two lists, seen once and seen again, and a share that learns from ghosts."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["Arc"]

_List = OrderedDict[int, None]


class Arc:
    """`once`, `again`: what is held, oldest first; their ghosts are remembered without being held."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._once: _List = OrderedDict()
        self._again: _List = OrderedDict()
        self._once_ghosts: _List = OrderedDict()
        self._again_ghosts: _List = OrderedDict()
        self._share = 0.0
        """Blocks that `once` should have."""

    def access(self, block: int) -> bool:
        if block in self._once:
            del self._once[block]
            self._again[block] = None
            return True
        if block in self._again:
            self._again.move_to_end(block)
            return True
        if block in self._once_ghosts:
            self._came_back(block, self._once_ghosts, self._again_ghosts, 1)
        elif block in self._again_ghosts:
            self._came_back(block, self._again_ghosts, self._once_ghosts, -1)
        else:
            self._first_time(block)
        return False

    def _came_back(self, block: int, ghosts: _List, others: _List, sign: int) -> None:
        step = max(1.0, len(others) / len(ghosts))
        self._share = min(max(self._share + sign * step, 0.0), float(self._budget))
        if len(self) == self._budget:
            self._replace(from_again=sign < 0)
        del ghosts[block]
        self._again[block] = None

    def _first_time(self, block: int) -> None:
        seen_once = len(self._once) + len(self._once_ghosts)
        if seen_once == self._budget:
            if self._once_ghosts:
                self._once_ghosts.popitem(last=False)
                if len(self) == self._budget:
                    self._replace(from_again=False)
            else:
                self._once.popitem(last=False)
        elif len(self) == self._budget:
            if seen_once + len(self._again) + len(self._again_ghosts) == 2 * self._budget:
                self._again_ghosts.popitem(last=False)
            self._replace(from_again=False)
        self._once[block] = None

    def _replace(self, *, from_again: bool) -> None:
        """One block becomes a ghost. `from_again`: the block that came back was a ghost of the seen-again list."""
        n = len(self._once)
        if n and (n > self._share or (from_again and n == self._share) or not self._again):
            victim, _ = self._once.popitem(last=False)
            self._once_ghosts[victim] = None
        else:
            victim, _ = self._again.popitem(last=False)
            self._again_ghosts[victim] = None

    def __contains__(self, block: int) -> bool:
        return block in self._once or block in self._again

    def __len__(self) -> int:
        return len(self._once) + len(self._again)
