"""Blocks as arrays in tape order, built once and carried along: a block more is inserted, nothing is sorted again.

index        0      1      2      3        tape order
starts       0     32     64     96        int64; so are stops, ids, last_used
scores      .5    nan     .1     .2        float64, nan where the block has none
order        2      3      0      1        most evictable first, made at the first plan that asks for it
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtape.planner.blocks import CLASS_RANK, PROTECTING, Block
from kvtape.planner.plan_errors import BadScore, InvalidBlock, OverlappingBlocks

__all__ = ["BlockTable", "Bools", "Floats", "Ints"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_ID, _START, _STOP, _USED, _CLASS, _FLAGS, _SCORE = (
    attrgetter(name) for name in ("block_id", "start", "stop", "last_used", "cache_class", "flags", "score")
)


class BlockTable:
    """The resident blocks of a session. `plan_hot_set` reads a table and never changes it.

    `append`, `pop` and `remove` keep what is sorted sorted, at the price of a copy of some arrays: O(n) moves, no
    comparison of all with all. Raises InvalidBlock, OverlappingBlocks, BadScore.
    """

    __slots__ = ("_ids_seen", "_orders", "blocks", "ids", "last_used", "own", "ranks", "scores", "starts", "stops")

    blocks: list[Block]
    """The blocks as they were given, in tape order."""
    ids: Ints
    starts: Ints
    stops: Ints
    last_used: Ints
    ranks: Ints
    """`CacheClass.rank` of each: a higher rank goes first."""
    own: Bools
    """Whether the block itself may not be evicted, whatever the spans of a plan."""
    scores: Floats

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self.blocks = list(blocks)
        self._orders: dict[bool, Ints] = {}
        self._ids_seen: set[int] | None = None
        self._read()
        if self.starts.size > 1 and (self.starts[1:] <= self.starts[:-1]).any():
            self._take(np.lexsort((self.ids, self.stops, self.starts)))
        self._check()

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def end(self) -> int:
        """The largest stop, 0 without blocks."""
        return int(self.stops[-1]) if self.blocks else 0

    def order(self, by_score: bool) -> Ints:
        """Indices of all blocks, most evictable first: class, then (asked for) lower score, older, smaller start.

        Blocks without a score come behind those of their class that have one. Kept until the blocks change.
        """
        found = self._orders.get(by_score)
        if found is None:
            # lexsort is stable and the blocks lie in tape order, so a tie goes to the smaller start.
            keys = (self.last_used, self.scores, -self.ranks) if by_score else (self.last_used, -self.ranks)
            found = self._orders[by_score] = np.lexsort(keys).astype(np.int64, copy=False)
        return found

    def append(self, block: Block) -> None:
        """One more block, behind all others in the tape."""
        if self._ids_seen is None:
            self._ids_seen = set(self.ids.tolist())
        _check_block(block, self.blocks[-1] if self.blocks else None)
        if block.block_id in self._ids_seen:
            raise InvalidBlock(f"block id {block.block_id} is used twice")
        new = BlockTable((block,))
        at = len(self.blocks)
        self.blocks.append(block)
        self._ids_seen.add(block.block_id)
        for name in _COLUMNS:
            setattr(self, name, np.concatenate((getattr(self, name), getattr(new, name))))
        for by_score, order in self._orders.items():
            self._orders[by_score] = np.insert(order, self._rank_of(at, order, by_score), at)

    def pop(self) -> Block:
        """Take the last block out, for instance to append it again with a token more. IndexError when there is none."""
        block = self.blocks[-1]
        self.remove([block.block_id])
        return block

    def remove(self, block_ids: Iterable[int]) -> None:
        """Take blocks out. Raises InvalidBlock for an id that is not there."""
        gone = set(block_ids)
        out = np.isin(self.ids, np.fromiter(gone, np.int64, len(gone)))
        if int(out.sum()) != len(gone):
            raise InvalidBlock(f"no block with id {min(gone - set(self.ids.tolist()))}")
        left = np.flatnonzero(~out)
        moved_to = np.cumsum(~out) - 1
        orders = {by: moved_to[order[~out[order]]] for by, order in self._orders.items()}
        self._take(left)
        self._orders = orders
        if self._ids_seen is not None:
            self._ids_seen -= gone

    def _rank_of(self, index: int, order: Ints, by_score: bool) -> int:
        """Where `index`, the last block, belongs in `order`: behind every block that is not less evictable."""

        def key(i: int) -> tuple[float, ...]:
            score = float(self.scores[i]) if by_score else 0.0
            return (-int(self.ranks[i]), math.inf if math.isnan(score) else score, int(self.last_used[i]))

        low, high, mine = 0, len(order), key(index)
        while low < high:
            middle = (low + high) // 2
            if key(int(order[middle])) <= mine:
                low = middle + 1
            else:
                high = middle
        return low

    def _read(self) -> None:
        blocks, n = self.blocks, len(self.blocks)

        def column(get: attrgetter[Any]) -> Ints:
            return np.fromiter(map(get, blocks), np.int64, n)

        try:
            self.ids, self.starts, self.stops = column(_ID), column(_START), column(_STOP)
            self.last_used, flags = column(_USED), column(_FLAGS)
        except OverflowError:
            wide = next(b for b in blocks if max(b.block_id, b.start, b.stop, abs(b.last_used)) >= 2**63)
            raise InvalidBlock(f"block {wide.block_id} [{wide.start}, {wide.stop}): a number past 63 bits") from None
        self.ranks = np.fromiter(map(CLASS_RANK.__getitem__, map(_CLASS, blocks)), np.int64, n)
        self.own = (flags & PROTECTING != 0) | (self.ranks == 0)
        scores = list(map(_SCORE, blocks))
        n_none = scores.count(None)
        self.scores = np.full(n, np.nan) if n_none == n else np.array(scores, dtype=np.float64)
        if np.count_nonzero(np.isfinite(self.scores)) != n - n_none:
            wrong = (b for b in blocks if b.score is not None and not math.isfinite(b.score))
            bad = min(wrong, key=_START)
            raise BadScore(f"block {bad.block_id} [{bad.start}, {bad.stop}) has score {bad.score}")

    def _take(self, indices: Ints) -> None:
        self.blocks = [self.blocks[i] for i in indices.tolist()]
        for name in _COLUMNS:
            setattr(self, name, getattr(self, name)[indices])

    def _check(self) -> None:
        starts, stops, ids = self.starts, self.stops, self.ids
        bad = (starts < 0) | (stops <= starts) | (ids < 0)
        bad[1:] |= starts[1:] < stops[:-1]
        if bad.any():
            first = int(np.argmax(bad))
            _check_block(self.blocks[first], self.blocks[first - 1] if first else None)
        if ids.size > 1 and not (ids[1:] > ids[:-1]).all():
            ordered = np.sort(ids)
            twice = ordered[1:][ordered[1:] == ordered[:-1]]
            if twice.size:
                raise InvalidBlock(f"block id {twice[0]} is used twice")


_COLUMNS = ("ids", "starts", "stops", "last_used", "ranks", "own", "scores")


def _check_block(block: Block, before: Block | None) -> None:
    if not 0 <= block.start < block.stop or block.block_id < 0:
        raise InvalidBlock(f"block {block.block_id} [{block.start}, {block.stop}) needs 0 <= start < stop and an id")
    if before is not None and block.start < before.stop:
        raise OverlappingBlocks(f"block {block.block_id} [{block.start}, {block.stop}) overlaps {before}")
