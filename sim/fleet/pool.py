"""A worker's KV memory: blocks in use, and blocks that nobody uses but that a later prompt may find again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvtape.sim.errors import SimulationError

__all__ = ["BlockPool"]


class BlockPool:
    """`size` blocks. A request holds its blocks from its beginning to its end; what it held is then evicted last used
    first, a prompt's last block before its first.

    Blocks have ids; those of tokens that are generated have none, since no prompt can name them before they are there.
    `evicted` counts blocks that left for others.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise SimulationError(f"a pool of {size} blocks holds nothing; give it at least 1")
        self.size = size
        self.evicted = 0
        self._held: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._nameless = 0

    @property
    def in_use(self) -> int:
        return len(self._held) + self._nameless

    @property
    def used(self) -> int:
        """Blocks in use and blocks that are kept."""
        return self.in_use + len(self._idle)

    def acquire(self, ids: Sequence[int], nameless: int) -> int | None:
        """Hold `ids`, a prompt's blocks from its first on, and `nameless` more. How many of the first were there.

        None, and nothing changes, when blocks in use leave too little room.
        """
        held, idle = self._held, self._idle
        if self.in_use + len(set(ids).difference(held)) + nameless > self.size:
            return None
        found = 0
        for block in ids:
            if block not in idle and block not in held:
                break
            found += 1
        # Behind the first that is not there a block may be there all the same: it is taken into use, but no hit.
        for block in ids:
            idle.pop(block, None)
            held[block] = held.get(block, 0) + 1
        self._nameless += nameless
        while self.used > self.size:
            idle.popitem(last=False)
            self.evicted += 1
        return found

    def release(self, ids: Sequence[int], nameless: int) -> None:
        """What `acquire` held. What nobody else holds is kept until its place is needed."""
        held, idle = self._held, self._idle
        self._nameless -= nameless
        for block in reversed(ids):
            if held[block] > 1:
                held[block] -= 1
            else:
                del held[block]
                idle[block] = None
