"""Which block each tape position belonged to at any moment, from the rows of the log alone.

The session's own catalog, read back: an event's block rows name the blocks that it made, lengthened or cut; what
they do not say (when a block was last used, that it came back from the cold store) follows from the events.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvtape.planner.blocks import NO_FLAGS, Block, CacheClass, Flag
from kvtape.planner.events import Event, Op
from kvtape.planner.ranges import RangeSet
from kvtape.planner.rows import BlockRow

__all__ = ["FILLS", "RecordedBlocks"]

FILLS = frozenset({Op.TRUNCATE, Op.TRIM, Op.ADMIT, Op.SHIFT, Op.RECOMPUTE})
"""What a prompt does before its reused blocks count as used: it cuts, and fills holes."""


class RecordedBlocks:
    """The blocks after the events that were told, in order. `hole`: what the session's policy does about holes."""

    def __init__(self, rows: Iterable[BlockRow], hole: str = "refill") -> None:
        self._rows: dict[int, list[BlockRow]] = {}
        for row in rows:
            self._rows.setdefault(row.seq, []).append(row)
        self._hole = hole
        self._blocks: list[Block] = []
        self._saved: dict[int, list[Block]] = {}
        self._reuses: tuple[int, int] | None = None

    def resident(self, ranges: RangeSet) -> list[Block]:
        """The blocks that stand in `ranges`, in tape order, as a plan finds them that comes next."""
        self._settle_reuse(failed=False)
        return [b for b in self._blocks if b.start in ranges]

    def apply(self, event: Event, resident: RangeSet) -> None:
        """One event more. `resident`: the resident ranges before it."""
        if event.op not in FILLS:
            self._settle_reuse(event.op in (Op.REFUSE, Op.FATAL) and self._has_holes(resident))
        start, stop, op = event.start or 0, event.stop or 0, event.op
        if op == Op.PROMPT and event.reason != "suffix":
            self._reuses = (start, event.turn)
        elif op in (Op.PREFILL, Op.DECODE):
            for row in self._rows.get(event.seq, ()):
                self._grow(row, event.turn)
        elif op == Op.TRUNCATE:
            self._cut_rows(event.seq)
            self._blocks = [b for b in self._blocks if b.start < start]
        elif op == Op.EVICT:
            self._cut_rows(event.seq)
            self._change(start, stop, lambda b: replace(b, flags=b.flags & ~Flag.RETRIEVED))
        elif op == Op.ADMIT:
            self._use(start, stop, event.turn, Flag.RETRIEVED)
        elif op == Op.SNAPSHOT:
            self._saved[event.snapshot_id or 0] = list(self._blocks)
        elif op == Op.RESTORE:
            self._blocks = list(self._saved.get(event.snapshot_id or 0, ()))

    def _settle_reuse(self, failed: bool) -> None:
        """What a prompt reuses is used once its holes are filled; a prompt that fails at a hole uses nothing."""
        if self._reuses is not None and not failed:
            reused, turn = self._reuses
            self._use(0, reused, turn)
        self._reuses = None

    def _has_holes(self, resident: RangeSet) -> bool:
        """Whether the last prompt has holes that it had to fill and has not."""
        if self._reuses is None or self._hole == "forget":
            return False
        return not RangeSet([(0, self._reuses[0])]).issubset(resident)

    def _use(self, start: int, stop: int, turn: int, flag: Flag = NO_FLAGS) -> None:
        self._change(start, stop, lambda b: replace(b, last_used=turn, flags=b.flags | flag))

    def _change(self, start: int, stop: int, change: Callable[[Block], Block]) -> None:
        for i in range(self._first_after(start), len(self._blocks)):
            if self._blocks[i].start >= stop:
                return
            self._blocks[i] = change(self._blocks[i])

    def _first_after(self, position: int) -> int:
        """Index of the first block that reaches past `position`."""
        i = max(0, bisect_right(self._blocks, position, key=lambda b: b.start) - 1)
        return i + (i < len(self._blocks) and self._blocks[i].stop <= position)

    def _grow(self, row: BlockRow, turn: int) -> None:
        last = self._blocks[-1] if self._blocks else None
        if last is not None and last.block_id == row.block_id:
            self._blocks[-1] = replace(last, stop=row.stop, last_used=turn)
        else:
            self._blocks.append(
                Block(row.block_id, row.start, row.stop, row.segment, CacheClass(row.cache_class), last_used=turn)
            )

    def _cut_rows(self, seq: int) -> None:
        """Blocks that were cut have ids of their own, and what else was known of the whole."""
        parts: dict[int, list[Block]] = {}
        for row in self._rows.get(seq, ()):
            i = self._first_after(row.start)
            if i < len(self._blocks):
                part = replace(self._blocks[i], block_id=row.block_id, start=row.start, stop=row.stop)
                parts.setdefault(i, []).append(part)
        for i in sorted(parts, reverse=True):
            self._blocks[i : i + 1] = sorted(parts[i], key=lambda b: b.start)
