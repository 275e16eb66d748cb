"""FIFO at one budget, without a queue: a block is in the cache while fewer than `budget` blocks were admitted after it.

Most accesses need no look at the cache: a first access is admitted, and so is one since whose last access the budget
was admitted over by sure admissions alone. Only the others go through the loop, one after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvtape.sim.blocks.accesses import Accesses
from kvtape.sim.blocks.block_trace import Ints

__all__ = ["fifo_hits"]

Bools = npt.NDArray[np.bool_]


def fifo_hits(a: Accesses, budget: int, *, held: bool) -> Bools:
    """Which accesses find their block; `held` looks before the first admission of the request. bool [accesses]."""
    sure = _surely_admitted(a.before, budget)
    admitted = _counts(sure)  # sure admissions before each access
    doubt = np.flatnonzero(~sure)
    in_doubt = _counts(~sure)
    stamps, more = _loop(a, sure, admitted, doubt, in_doubt, budget)
    last = a.before
    known = last >= 0
    came = np.where(sure[last], admitted[last] + more[in_doubt[last]], 0)
    if len(doubt):
        came = np.where(sure[last], came, stamps[np.minimum(in_doubt[last], len(doubt) - 1)])
    looked = a.starts[a.request] if held else np.arange(len(a))
    now = admitted[looked] + more[in_doubt[looked]]
    found: Bools = known & (now - came <= budget)
    if held:  # twice in one request: the second is looked up when the first is not admitted yet
        found &= last < looked
    return found


def _counts(marks: Bools) -> Ints:
    counts = np.zeros(len(marks) + 1, np.int64)
    np.cumsum(marks, out=counts[1:])
    return counts


def _surely_admitted(before: Ints, budget: int) -> Bools:
    """First accesses, and those that sure admissions alone have pushed out since the last one."""
    sure = before < 0
    while True:
        admitted = _counts(sure)
        pushed = (before >= 0) & (admitted[:-1] - admitted[before + 1] >= budget)
        grown = sure | pushed
        if (grown == sure).all():
            return sure
        sure = grown


def _loop(a: Accesses, sure: Bools, admitted: Ints, doubt: Ints, in_doubt: Ints, budget: int) -> tuple[Ints, Ints]:
    """Of the accesses in doubt: the admission number of the block after each, and admissions among them before each."""
    last = a.before[doubt]
    source = np.where(sure[last], -1, in_doubt[last]).tolist()
    base, passed = admitted[last].tolist(), in_doubt[last].tolist()
    clock = admitted[doubt].tolist()
    stamps = [0] * len(doubt)
    more = [0] * (len(doubt) + 1)
    n = 0
    for k, (src, early) in enumerate(zip(source, passed, strict=True)):
        stamp = stamps[src] if src >= 0 else base[k] + more[early]
        now = clock[k] + n
        if now - stamp > budget:
            stamp = now
            n += 1
        stamps[k] = stamp
        more[k + 1] = n
    return _array(stamps), _array(more)


def _array(values: list[Any]) -> Ints:
    return np.array(values, np.int64)
