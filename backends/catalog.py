"""Which block each tape position belongs to.

Invariant: blocks are sorted, disjoint, cover the tape from 0, and each is wholly resident or wholly not (an evict
of a part splits the block, and the parts get ids of their own).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvtape.backends.resident_table import ResidentTable
from kvtape.planner.blocks import NO_FLAGS, Block, CacheClass, Flag
from kvtape.planner.events import BlockRef
from kvtape.planner.ranges import RangeSet
from kvtape.planner.table import BlockTable

__all__ = ["BlockCatalog", "CatalogState", "SegmentKind", "Stretch"]


@dataclass(frozen=True, slots=True)
class SegmentKind:
    """What the planner must know of a stretch of tokens: its kind and how evictable it is."""

    kind: str
    cache_class: CacheClass
    flags: Flag = NO_FLAGS


@dataclass(frozen=True, slots=True)
class Stretch:
    """A segment on the tape: `[start, stop)` in tape positions."""

    start: int
    stop: int
    kind: SegmentKind


@dataclass(frozen=True, slots=True)
class _Entry:
    block: Block
    origin: int
    """Tape position where the segment's block grid begins."""


CatalogState = tuple[_Entry, ...]
"""A saved catalog; ids that were given stay given."""


class BlockCatalog:
    """Blocks of `block_tokens` tokens, cut from each segment's start."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._entries: list[_Entry] = []
        self._starts: list[int] = []
        self._next_id = 0
        self._resident = ResidentTable()

    @property
    def tape_length(self) -> int:
        return self._entries[-1].block.stop if self._entries else 0

    def blocks(self) -> list[Block]:
        return [e.block for e in self._entries]

    def extend(self, n_tokens: int, kind: SegmentKind, *, new_segment: bool, clock: int) -> list[Block]:
        """Put `n_tokens` more on the end; the last block grows first when its segment goes on.

        Returns the blocks that are new or longer, in order.
        """
        changed: list[Block] = []
        at, end = self.tape_length, self.tape_length + n_tokens
        last = self._entries[-1] if self._entries else None
        origin = at
        if last is not None and not new_segment and _same_kind(last.block, kind):
            origin = last.origin
            room = self._grid_stop(last.block.start, origin) - last.block.stop
            if room > 0:
                at = min(end, last.block.stop + room)
                grown = replace(last.block, stop=at, last_used=clock)
                self._entries[-1] = _Entry(grown, origin)
                self._resident.note(grown.block_id, grown)
                changed.append(grown)
        while at < end:
            stop = min(end, self._grid_stop(at, origin))
            changed.append(self._append(at, stop, kind, origin, clock))
            at = stop
        return changed

    def grow(self, stretches: Sequence[Stretch], tape_stop: int, *, op_start: int, clock: int) -> list[Block]:
        """Cover the tape up to `tape_stop`, each position under its stretch's kind.

        A stretch's block grid begins at its own start, or at `op_start` when the operation began inside it.
        """
        changed: list[Block] = []
        for stretch in stretches:
            at, stop = max(stretch.start, self.tape_length), min(stretch.stop, tape_stop)
            if at < stop:
                fresh = at == max(stretch.start, op_start)
                changed += self.extend(stop - at, stretch.kind, new_segment=fresh, clock=clock)
        return changed

    def truncate(self, tape_stop: int) -> list[Block]:
        """Cut the blocks at `tape_stop`; a block that straddles it gets a new id and is returned."""
        while self._entries and self._entries[-1].block.start >= tape_stop:
            self._resident.note(self._entries.pop().block.block_id, None)
            self._starts.pop()
        if self._entries and self._entries[-1].block.stop > tape_stop:
            entry = self._entries[-1]
            shorter = replace(entry.block, block_id=self._take_id(), stop=tape_stop)
            self._entries[-1] = _Entry(shorter, entry.origin)
            self._replaced(entry.block, shorter)
            return [shorter]
        return []

    def split(self, ranges: Iterable[tuple[int, int]]) -> list[Block]:
        """Cut blocks at the borders of `ranges`, so that each block is wholly in or wholly out.

        Parts of a cut block get new ids. Returns those parts.
        """
        borders = sorted({b for pair in ranges for b in pair})
        made: dict[int, Block] = {}
        for border in borders:
            i = bisect_right(self._starts, border) - 1
            if i < 0:
                continue
            entry = self._entries[i]
            if not entry.block.start < border < entry.block.stop:
                continue
            left = replace(entry.block, block_id=self._take_id(), stop=border)
            right = replace(entry.block, block_id=self._take_id(), start=border)
            self._entries[i : i + 1] = [_Entry(left, entry.origin), _Entry(right, entry.origin)]
            self._starts[i : i + 1] = [left.start, right.start]
            self._replaced(entry.block, left, right)
            made.pop(entry.block.block_id, None)
            made |= {left.block_id: left, right.block_id: right}
        return list(made.values())

    def inside(self, start: int, stop: int) -> list[Block]:
        """The blocks that overlap `[start, stop)`."""
        i = max(0, bisect_right(self._starts, start) - 1)
        found: list[Block] = []
        while i < len(self._entries) and self._entries[i].block.start < stop:
            if self._entries[i].block.stop > start:
                found.append(self._entries[i].block)
            i += 1
        return found

    def refs(self, start: int, stop: int) -> tuple[BlockRef, ...]:
        return tuple(BlockRef(b.block_id, b.start, b.stop) for b in self.inside(start, stop))

    def resident(self, ranges: RangeSet) -> list[Block]:
        """The blocks whose tokens are resident; `ranges` is the fold's resident set."""
        found: list[Block] = []
        for r in ranges:
            found += self.inside(r.start, r.stop)
        return found

    def resident_table(self, ranges: RangeSet) -> BlockTable:
        """`resident` as a table that is carried along from call to call; not to be changed."""
        return self._resident.at(ranges, self.inside)

    def touch(self, start: int, stop: int, clock: int, *, retrieved: bool = False) -> None:
        """Mark the blocks of `[start, stop)` as used at logical time `clock`, and as back from the cold store."""
        flag = Flag.RETRIEVED if retrieved else NO_FLAGS
        self._change(start, stop, lambda b: replace(b, last_used=clock, flags=b.flags | flag))

    def forget_retrieved(self, start: int, stop: int) -> None:
        """The blocks of `[start, stop)` left the cache: that they had come back once says nothing any more."""
        self._change(
            start, stop, lambda b: replace(b, flags=b.flags & ~Flag.RETRIEVED) if b.flags & Flag.RETRIEVED else b
        )

    def _change(self, start: int, stop: int, change: Callable[[Block], Block]) -> None:
        i = max(0, bisect_right(self._starts, start) - 1)
        while i < len(self._entries) and self._entries[i].block.start < stop:
            entry = self._entries[i]
            if entry.block.stop > start:
                changed = change(entry.block)
                if changed is not entry.block:
                    self._entries[i] = _Entry(changed, entry.origin)
                    self._resident.note(changed.block_id, changed)
            i += 1

    def copy_blocks(self) -> CatalogState:
        """A saved state for `restore_blocks`; ids that were given stay given."""
        return tuple(self._entries)

    def restore_blocks(self, saved: CatalogState) -> None:
        self._entries = list(saved)
        self._starts = [e.block.start for e in saved]
        self._resident.forget()

    def check_integrity(self) -> None:
        """Raise AssertionError when the blocks do not tile the tape or an id occurs twice."""
        at = 0
        for start, entry in zip(self._starts, self._entries, strict=True):
            assert entry.block.start == at == start, f"block {entry.block.block_id} starts at {entry.block.start}"
            assert entry.block.stop > at, f"block {entry.block.block_id} is empty"
            at = entry.block.stop
        ids = [e.block.block_id for e in self._entries]
        assert len(set(ids)) == len(ids), "a block id occurs twice"

    def _grid_stop(self, start: int, origin: int) -> int:
        return origin + ((start - origin) // self.block_tokens + 1) * self.block_tokens

    def _append(self, start: int, stop: int, kind: SegmentKind, origin: int, clock: int) -> Block:
        block = Block(
            block_id=self._take_id(),
            start=start,
            stop=stop,
            kind=kind.kind,
            cache_class=kind.cache_class,
            flags=kind.flags,
            last_used=clock,
        )
        self._entries.append(_Entry(block, origin))
        self._starts.append(start)
        self._resident.note(block.block_id, block)
        return block

    def _replaced(self, block: Block, *parts: Block) -> None:
        self._resident.note(block.block_id, None)
        for part in parts:
            self._resident.note(part.block_id, part)

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1


def _same_kind(block: Block, kind: SegmentKind) -> bool:
    """RETRIEVED says where the block's rows came from, not what its segment is."""
    own = block.flags & ~Flag.RETRIEVED
    return (block.kind, block.cache_class, own) == (kind.kind, kind.cache_class, kind.flags)
