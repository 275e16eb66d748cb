"""The block hashes of a session's tape, followed through a log: what `tape` told a recorder, read back.

Each prefill and decode brings the hashes of the blocks that it touched; what a prompt was is put together from them. A
block that no row told is not known, and so is no prompt that has it; those before it stay known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtape.planner.events import Op

__all__ = ["HashTape"]


class _Saved(NamedTuple):
    length: int
    blocks: dict[int, int]
    tails: list[tuple[int, int]]


@dataclass(slots=True)
class HashTape:
    """`length` in tokens, `size` tokens a block (None until a row says it).

    `_blocks`: hashes of whole blocks by number; `_tails`: ends of partial ones, ascending, with their hashes.
    """

    length: int = 0
    size: int | None = None
    _blocks: dict[int, int] = field(default_factory=dict)
    _tails: list[tuple[int, int]] = field(default_factory=list)
    _saved: dict[int, _Saved] = field(default_factory=dict)

    def follow(
        self,
        op: str,
        start: int | None,
        stop: int | None,
        snapshot_id: int | None,
        ids: Sequence[int] | None,
        size: int | None,
    ) -> None:
        """Apply an event and its row of hashes; `ids` None where it has none.

        A recompute changes nothing: it brings back what is on the tape, and its last block is no end of it.
        """
        if op in (Op.PREFILL, Op.DECODE) and start is not None and stop is not None:
            self.brought(start, stop, ids or (), size)
        elif op == Op.TRUNCATE and start is not None:
            self.cut(start)
        elif op == Op.LOST:
            self.cut(0)
        elif op == Op.SNAPSHOT and snapshot_id is not None:
            self.save(snapshot_id)
        elif op == Op.RESTORE and snapshot_id is not None:
            self.restore(snapshot_id)

    def brought(self, start: int, stop: int, ids: Sequence[int], size: int | None) -> None:
        """Tokens `[start, stop)` came on the end of the tape.

        `ids`: hashes of the blocks of `size` tokens that they touch, a partial last one too; empty where not known.
        """
        self.cut(start)
        self.length = stop
        if size is None:
            return
        if self.size is None:
            self.size = size
        if size != self.size:  # numbers of other blocks
            return
        whole = stop // size
        for number, value in enumerate(ids, start // size):
            if number < whole:
                self._blocks[number] = value
            else:
                self._tails.append((stop, value))

    def cut(self, length: int) -> None:
        """The tape ends at `length`: a block that reaches past it is gone."""
        if self.size is not None:
            for number in range(length // self.size, self.length // self.size):
                self._blocks.pop(number, None)
        while self._tails and self._tails[-1][0] > length:
            self._tails.pop()
        self.length = length

    def save(self, snapshot_id: int) -> None:
        self._saved[snapshot_id] = _Saved(self.length, dict(self._blocks), list(self._tails))

    def restore(self, snapshot_id: int) -> None:
        """The tape as it was saved; nothing is known of it where that was not seen."""
        self.length, blocks, tails = self._saved.get(snapshot_id, _Saved(0, {}, []))
        self._blocks, self._tails = dict(blocks), list(tails)

    def path(self, length: int) -> list[int] | None:
        """Hashes of the whole blocks of the first `length` tokens, and of a partial last one where the log has it.

        None where a whole block is not known, or nothing is.
        """
        if self.size is None or length > self.length:
            return None
        numbers = range(length // self.size)
        if not all(number in self._blocks for number in numbers):
            return None
        ids = [self._blocks[number] for number in numbers]
        if length % self.size:
            ids += [value for end, value in reversed(self._tails) if end == length][:1]
        return ids or None
