"""Blocks as arrays in tape order, built once and carried along: what is new is inserted, nothing is sorted again.

index        0      1      2      3        tape order
starts       0     32     64     96        int64; so are stops, ids, last_used
scores      .5    nan     .1     .2        float64, nan where the block has none
order        2      3      0      1        most evictable first, made at the first plan that asks for it
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvtape.planner.blocks import PROTECTING, Block
from kvtape.planner.plan_errors import BadScore, InvalidBlock, OverlappingBlocks

__all__ = ["BlockTable", "Bools", "Floats", "Ints"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class BlockTable:
    """The resident blocks of a session. `plan_hot_set` reads a table and never changes it.

    `insert` and `remove` keep what is sorted sorted, at the price of a copy of some arrays: O(n) moves, and
    log n comparisons for each new block. Raises InvalidBlock, OverlappingBlocks, BadScore.
    """

    __slots__ = ("_orders", "blocks", "ids", "last_used", "own", "ranks", "scores", "starts", "stops")

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

    @property
    def n_tokens(self) -> int:
        """Tokens of all blocks."""
        return int((self.stops - self.starts).sum())

    def order(self, by_score: bool) -> Ints:
        """Indices of all blocks, most evictable first: class, then (asked for) lower score, older, smaller start.

        Blocks without a score come behind those of their class that have one. Kept until the blocks change.
        """
        found = self._orders.get(by_score)
        if found is None:
            found = self._orders[by_score] = self._score_order() if by_score else self._age_order()
        return found

    def insert(self, blocks: Iterable[Block]) -> None:
        """More blocks, anywhere between those that are there."""
        new = BlockTable(blocks)
        if not new.blocks:
            return
        at = self._places(new)
        # From the back, so that earlier places stay valid.
        for place, block in zip(at[::-1].tolist(), new.blocks[::-1], strict=True):
            self.blocks.insert(place, block)
        orders, self._orders = self._orders, {}
        for name in _COLUMNS:
            setattr(self, name, np.insert(getattr(self, name), at, getattr(new, name)))
        now = at + np.arange(len(new))
        if len(new) * 8 > len(self):
            return  # too many to be put in their ranks one by one: ranked when next asked for
        moved = np.delete(np.arange(len(self)), now)
        for by_score, order in orders.items():
            ranked = moved[order]
            for index in now.tolist():
                ranked = np.insert(ranked, self._rank_of(index, ranked, by_score), index)
            self._orders[by_score] = ranked

    def remove(self, block_ids: Iterable[int]) -> None:
        """Take blocks out. Raises InvalidBlock for an id that is not there."""
        gone = set(block_ids)
        out = np.isin(self.ids, np.fromiter(gone, np.int64, len(gone)))
        rows = np.flatnonzero(out)
        if rows.size != len(gone):
            raise InvalidBlock(f"no block with id {min(gone - set(self.ids.tolist()))}")
        if not gone:
            return
        moved_to = np.cumsum(~out) - 1
        orders = {by: moved_to[order[~out[order]]] for by, order in self._orders.items()}
        # Runs of neighbours, from the back.
        for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)[::-1]:
            del self.blocks[int(run[0]) : int(run[-1]) + 1]
        for name in _COLUMNS:
            setattr(self, name, getattr(self, name)[~out])
        self._orders = orders

    def _places(self, new: BlockTable) -> Ints:
        """Before which of the blocks each of `new` belongs."""
        at = np.searchsorted(self.starts, new.starts)
        if len(self):
            before, behind = np.maximum(at - 1, 0), np.minimum(at, len(self) - 1)
            hits = ((at > 0) & (self.stops[before] > new.starts)) | (
                (at < len(self)) & (self.starts[behind] < new.stops)
            )
            if hits.any():
                i = int(np.argmax(hits))
                other = before[i] if at[i] > 0 and self.stops[before[i]] > new.starts[i] else behind[i]
                raise _overlap(new.blocks[i], self.blocks[int(other)])
            twice = np.isin(new.ids, self.ids)
            if twice.any():
                raise InvalidBlock(f"block id {new.ids[int(np.argmax(twice))]} is used twice")
        return np.asarray(at)

    def _age_order(self) -> Ints:
        # lexsort is stable and the blocks lie in tape order, so a tie goes to the smaller start.
        return np.lexsort((self.last_used, -self.ranks)).astype(np.int64, copy=False)

    def _score_order(self) -> Ints:
        order = np.argsort(self.scores)
        ranked = self.scores[order]
        if (ranked[1:] == ranked[:-1]).any() or np.isnan(ranked[-2:]).sum() == 2:
            return np.lexsort((self.last_used, self.scores, -self.ranks)).astype(np.int64, copy=False)
        # No ties, as is usual for measured scores: age and place need not be looked at.
        least_protected_first = np.argsort(-self.ranks[order].astype(np.int8), kind="stable")
        return order[least_protected_first].astype(np.int64, copy=False)

    def _rank_of(self, index: int, order: Ints, by_score: bool) -> int:
        """Where the block at `index` belongs in `order`: behind every block that is more evictable."""
        low, high, mine = 0, len(order), self._key(index, by_score)
        while low < high:
            middle = (low + high) // 2
            if self._key(int(order[middle]), by_score) < mine:
                low = middle + 1
            else:
                high = middle
        return low

    def _key(self, i: int, by_score: bool) -> tuple[float, ...]:
        """What the block at `i` is ranked by, the place among all included: no two are equal."""
        score = float(self.scores[i]) if by_score else 0.0
        return (-int(self.ranks[i]), math.inf if math.isnan(score) else score, int(self.last_used[i]), i)

    def _read(self) -> None:
        # Comprehensions: three quarters of the time of a map of attribute getters.
        blocks, n = self.blocks, len(self.blocks)
        try:
            self.ids = np.fromiter([b.block_id for b in blocks], np.int64, n)
            self.starts = np.fromiter([b.start for b in blocks], np.int64, n)
            self.stops = np.fromiter([b.stop for b in blocks], np.int64, n)
            self.last_used = np.fromiter([b.last_used for b in blocks], np.int64, n)
        except OverflowError:
            wide = next(b for b in blocks if max(b.block_id, b.start, b.stop, abs(b.last_used)) >= 2**63)
            raise InvalidBlock(f"block {wide.block_id} [{wide.start}, {wide.stop}): a number past 63 bits") from None
        # Small numbers, and bytes are made faster than arrays.
        self.ranks = np.frombuffer(bytes([b.cache_class.rank for b in blocks]), np.uint8).astype(np.int64)
        try:
            flags = np.frombuffer(bytes([b.flags for b in blocks]), np.uint8)
        except ValueError:
            odd = next(b for b in blocks if not 0 <= b.flags < 256)
            raise InvalidBlock(f"block {odd.block_id} [{odd.start}, {odd.stop}): flags {int(odd.flags)}") from None
        self.own = (flags & PROTECTING != 0) | (self.ranks == 0)
        self.scores, n_none = _read_scores(blocks)
        if np.count_nonzero(np.isfinite(self.scores)) != n - n_none:
            wrong = (b for b in blocks if b.score is not None and not math.isfinite(b.score))
            bad = min(wrong, key=lambda b: b.start)
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


def _read_scores(blocks: list[Block]) -> tuple[Floats, int]:
    """The scores, nan for those that have none, and how many have none."""
    given = [b.score for b in blocks]
    # Counting compares each with None: cheap among Nones, dear among floats.
    if given and given[0] is None and given.count(None) == len(given):
        return np.full(len(given), np.nan), len(given)
    scores = np.fromiter(given, np.float64, len(given))  # None is read as nan
    return scores, 0 if np.isfinite(scores).all() else given.count(None)


def _check_block(block: Block, before: Block | None) -> None:
    if not 0 <= block.start < block.stop or block.block_id < 0:
        raise InvalidBlock(f"block {block.block_id} [{block.start}, {block.stop}) needs 0 <= start < stop and an id")
    if before is not None and block.start < before.stop:
        raise _overlap(block, before)


def _overlap(block: Block, other: Block) -> OverlappingBlocks:
    return OverlappingBlocks(f"block {block.block_id} [{block.start}, {block.stop}) overlaps {other}")
