"""From accesses that found their block to a hit rate, under the rules of weighting, prefix and warm-up."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt

from kvtape.sim.blocks.accesses import Accesses
from kvtape.sim.blocks.block_trace import Ints
from kvtape.sim.blocks.rules import Rules

__all__ = ["Measure"]


class Measure:
    """Counts hits. All sums are integers, so no order of adding can show."""

    def __init__(self, a: Accesses, rules: Rules) -> None:
        self._a, self._longest = a, rules.prefix == "longest"
        self._first = first = int(a.starts[a.warmup])
        self._weights = a.tokens[first:] if rules.weighting == "token" else np.ones(len(a) - first, np.int64)
        self._depth, self._starts = a.depth[first:], a.starts[a.warmup : -1] - first
        self._counts = np.diff(a.starts[a.warmup :])
        self.total = int(self._weights.sum())
        """Tokens or blocks that were looked up and measured."""

    def hits(self, found: npt.NDArray[np.bool_]) -> int:
        """Weight of the hits among measured accesses. `found`: bool [accesses]."""
        found = found[self._first :]
        counted = self._before_first_miss(found) if self._longest else found
        return int(self._weights[counted].sum())

    def rate(self, hits: int) -> float:
        """Hits as a share of everything that was looked up."""
        return float(Fraction(hits, self.total)) if self.total else 0.0

    def hits_by_budget(self, least: Ints) -> tuple[Ints, Ints]:
        """(budgets, hits at each), rising, where access i is found at every budget of `least[i]` or more.

        Only budgets at which the hits change. `least` above the number of blocks is no budget at all.
        """
        if self._longest:
            least = self._deepest_first_need(least)
        least = least[self._first :]
        real = (least <= self._a.n_blocks) & (self._weights > 0)
        budgets, inverse = np.unique(least[real], return_inverse=True)
        gained = np.zeros(len(budgets), np.int64)
        np.add.at(gained, inverse, self._weights[real])
        return budgets, np.cumsum(gained)

    def _before_first_miss(self, found: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        first_miss = np.minimum.reduceat(np.where(found, len(self._a), self._depth), self._starts)
        alive: npt.NDArray[np.bool_] = self._depth < np.repeat(first_miss, self._counts)
        return alive

    def _deepest_first_need(self, least: Ints) -> Ints:
        """A block counts only where all before it are found: the largest need from the first block on."""
        a = self._a
        order = a.starts[a.request] + a.depth
        by_depth = np.empty_like(least)
        by_depth[order] = least
        # Every request starts above whatever the one before reached, so that the running maximum starts anew.
        limit = a.n_blocks + 1
        offset = a.request.astype(np.int64) * (limit + 1)
        in_turn = np.empty_like(offset)
        in_turn[order] = offset
        raised = np.maximum.accumulate(np.minimum(by_depth, limit) + in_turn) - in_turn
        needs: Ints = raised[order]
        return needs
