"""W-TinyLFU (Einziger, Friedman and Manes 2017): what leaves a small LRU window must be wanted more than its victim.

The main part is a segmented LRU (Karedla, Love and Wherry 1994): probation, and protected for what was used there.
Uses are counted exactly where the paper sketches them, and halved at its period, so no hash decides anything here.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["WTinyLfu"]

_WINDOW_SHARE = 100
_PROTECTED_OF_MAIN = (4, 5)
_SAMPLE = 10
_MOST_USES = 15

_Lru = OrderedDict[int, None]


class WTinyLfu:
    """A hundredth of the budget, at least one block, is the window's; four fifths of the rest are protected."""

    def __init__(self, budget: int) -> None:
        self._window_size = max(1, budget // _WINDOW_SHARE)
        self._main_size = budget - self._window_size
        self._protected_size = self._main_size * _PROTECTED_OF_MAIN[0] // _PROTECTED_OF_MAIN[1]
        self._window: _Lru = OrderedDict()
        self._probation: _Lru = OrderedDict()
        self._protected: _Lru = OrderedDict()
        self._uses: dict[int, int] = {}
        self._until_halving = self._sample = _SAMPLE * budget

    def access(self, block: int) -> bool:
        self._count(block)
        if block in self._window:
            self._window.move_to_end(block)
        elif block in self._protected:
            self._protected.move_to_end(block)
        elif block in self._probation:
            self._promote(block)
        else:
            self._window[block] = None
            if len(self._window) > self._window_size:
                candidate, _ = self._window.popitem(last=False)
                self._offer(candidate)
            return False
        return True

    def _count(self, block: int) -> None:
        uses = self._uses.get(block, 0)
        if uses < _MOST_USES:
            self._uses[block] = uses + 1
        self._until_halving -= 1
        if not self._until_halving:
            self._until_halving = self._sample
            self._uses = {b: n // 2 for b, n in self._uses.items() if n > 1}

    def _promote(self, block: int) -> None:
        del self._probation[block]
        self._protected[block] = None
        if len(self._protected) > self._protected_size:
            back, _ = self._protected.popitem(last=False)
            self._probation[back] = None

    def _offer(self, candidate: int) -> None:
        """The candidate gets in where there is room, or in the place of a victim that was used less often."""
        if len(self._probation) + len(self._protected) >= self._main_size:
            victims = self._probation or self._protected
            if not victims:
                return
            victim = next(iter(victims))
            if self._uses.get(candidate, 0) <= self._uses.get(victim, 0):
                return
            del victims[victim]
        self._probation[candidate] = None

    def __contains__(self, block: int) -> bool:
        return block in self._window or block in self._probation or block in self._protected

    def __len__(self) -> int:
        return len(self._window) + len(self._probation) + len(self._protected)
