"""Token ids for a log without content: equal where the log's hashes say that the tokens were equal."""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvtape.planner.rows import TokensRow

__all__ = ["Surrogates"]


class Surrogates:
    """One numbering for a whole log: token i of the block with hash h is always the same id.

    Hashes are chained, so equal hashes mean equal tokens from the start of the tape on. A block that was hashed when
    it was not full has another hash than the whole one, so reuse is found up to the last whole block, and inside
    one only where the log itself shows it.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, int], int] = {}
        self.count = 0

    def of(self, row: TokensRow | None, start: int, n: int) -> tuple[int, ...]:
        """Ids for tape positions `[start, start + n)`; new ones where no hash names them."""
        hashes: Sequence[str] = json.loads(row.hashes) if row is not None else ()
        size = row.block_tokens if row is not None else 1
        ids: list[int] = []
        at = start
        while at < start + n:
            index = at // size - start // size
            if index >= len(hashes):
                ids += self._fresh(start + n - at)
                break
            stop = min((at // size + 1) * size, start + n)
            first = self._block(hashes[index], size) + at % size
            ids += range(first, first + stop - at)
            at = stop
        return tuple(ids)

    def _fresh(self, n: int) -> range:
        self.count += n
        return range(self.count - n, self.count)

    def _block(self, name: str, size: int) -> int:
        first = self._first.get((name, size))
        if first is None:
            first = self._first[name, size] = self._fresh(size).start
        return first
