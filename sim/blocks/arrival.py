"""FIFO without a queue: a block is in the cache while fewer than `budget` blocks were admitted after it.

First accesses are admitted at every budget, so what came between two accesses of a block is known but for the
admissions among other repeats. A repeat is admitted for sure when sure admissions alone have pushed its block out,
and found for sure when all that may have been admitted since the block's first access would not push it out. Only what
is then left in doubt goes through a loop, one after the other.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtape.sim.blocks.accesses import Accesses
from kvtape.sim.blocks.block_trace import Ints, index_kind

__all__ = ["Fifos"]

Bools = npt.NDArray[np.bool_]

_CHUNK = 1 << 18
"""Python numbers made at a time: each takes ten times the memory that it takes in an array."""

_WORTH_A_ROUND = 50
"""Another round must settle one repeat in so many: the loop does the others as quickly."""


class Fifos:
    """FIFO at any budget over one list of accesses; `held` looks before the first admission of the request.

    A moment is a pair: first accesses before it, repeats before it.
    """

    def __init__(self, a: Accesses, *, held: bool) -> None:
        self._n = len(a)
        self._kind = index_kind(len(a))
        self._again = np.flatnonzero(a.before >= 0).astype(self._kind)
        repeats = _counts(a.before >= 0, self._kind)
        last = a.before[self._again]
        first = np.empty(a.n_blocks, self._kind)
        new = np.flatnonzero(a.before < 0)
        first[a.blocks[new]] = new
        self._first = _moment(first[a.blocks[self._again]], repeats)
        self._now = _moment(self._again, repeats)
        self._came = _moment(last, repeats)
        looked = a.starts.astype(self._kind)[a.request[self._again]] if held else self._again
        self._looked = _moment(looked, repeats) if held else self._now
        self._there = last < looked  # a second time in one request it is looked up before the first is admitted
        self._source = np.where(a.before[last] >= 0, self._came[1], -1)
        """The repeat that a repeat's last access is; -1 where that is a first access."""

    def hits(self, budget: int) -> Bools:
        """Which accesses find their block. bool [accesses]."""
        stamps, admitted = self._stamps(self._surely_admitted(budget), self._surely_found(budget), budget)
        now = self._looked[0] + admitted[self._looked[1]]
        found = np.zeros(self._n, bool)
        found[self._again] = self._there & (now - stamps <= budget)
        return found

    def _surely_admitted(self, budget: int) -> Bools:
        """Of the repeats: pushed out since the last access. What is pushed out is admitted, so rounds help."""
        after = self._came[1] + (self._source >= 0)  # the last access has been
        firsts = self._now[0] - self._came[0] - (self._source < 0)
        sure: Bools = firsts >= budget
        while True:
            more = _counts(sure, self._kind)
            grown = firsts + more[:-1] - more[after] >= budget
            gain = int(grown.sum()) - int(sure.sum())
            sure = grown
            if gain <= len(sure) // _WORTH_A_ROUND:
                return sure

    def _surely_found(self, budget: int) -> Bools:
        """Of the repeats: never pushed out since the first access. What is found is not admitted, so rounds help."""
        firsts = self._now[0] - self._first[0]
        safe: Bools = firsts + (self._now[1] - self._first[1]) <= budget
        while True:
            may = _counts(~safe, self._kind)
            grown = firsts + may[:-1] - may[self._first[1]] <= budget
            gain = int(grown.sum()) - int(safe.sum())
            safe = grown
            if gain <= len(safe) // _WORTH_A_ROUND:
                return safe

    def _stamps(self, sure: Bools, safe: Bools, budget: int) -> tuple[Ints, Ints]:
        """For each repeat, how many were admitted when its block was; and repeats admitted before each repeat."""
        known = _counts(sure, self._kind)
        open_ = ~(sure | safe)
        doubt = np.flatnonzero(open_).astype(self._kind)
        ordinal = _counts(open_, self._kind)
        # The stamp of a block whose last access is in doubt is that access's own; of one that was never pushed out,
        # all admissions before its first access; else all before its last.
        kept = (self._source >= 0) & safe[self._source]
        came = tuple(np.where(kept, a, b) for a, b in zip(self._first, self._came, strict=True))
        linked = (self._source >= 0) & open_[self._source]
        links = np.where(linked[doubt], ordinal[self._source[doubt]], ~ordinal[came[1][doubt]])
        base = came[0][doubt] + known[came[1][doubt]]
        clock = self._now[0][doubt] + known[doubt]
        del doubt, kept, safe
        mine, more = _follow(links, base, clock, budget)
        del links, base, clock
        admitted = known + more[ordinal]
        stamps = came[0] + admitted[came[1]]
        if linked.any():
            stamps[linked] = mine[ordinal[self._source[linked]]]
        return stamps, admitted


def _moment(at: Ints, repeats: Ints) -> tuple[Ints, Ints]:
    """First accesses before each access, and repeats before it."""
    before = repeats[at]
    return at - before, before


def _follow(links: Ints, base: Ints, clock: Ints, budget: int) -> tuple[Ints, Ints]:
    """The stamp of each doubtful repeat's block after it, and admissions among them before each and after all.

    A link is the doubtful repeat whose stamp it is; or, inverted, how many of them came before the block was admitted.
    """
    code = "i" if base.dtype == np.int32 else "q"
    mine, more = array(code), array(code, [0])
    n = 0
    for start in range(0, len(links), _CHUNK):
        columns = (column[start : start + _CHUNK].tolist() for column in (links, base, clock))
        for link, known, now in zip(*columns, strict=True):
            stamp = mine[link] if link >= 0 else known + more[~link]
            if now + n - stamp > budget:
                stamp = now + n
                n += 1
            mine.append(stamp)
            more.append(n)
    return np.frombuffer(mine, base.dtype) if mine else np.zeros(0, base.dtype), np.frombuffer(more, base.dtype)


def _counts(marks: Bools, kind: Any = np.int64) -> Any:
    """How many marks stand before each place, and in all."""
    counts = np.zeros(len(marks) + 1, kind)
    np.cumsum(marks, out=counts[1:])
    return counts
