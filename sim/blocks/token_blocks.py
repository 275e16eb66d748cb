"""Block ids of prompts that come as token ids: a number for each distinct block behind the same blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvtape.traces.tape import BLOCK_TOKENS

__all__ = ["TokenBlocks"]


class TokenBlocks:
    """`size`: tokens of a block; default: that of a recording. A partial last block has an id as well."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size or BLOCK_TOKENS
        self._known: dict[tuple[int, bytes], int] = {}

    def ids(self, tokens: Sequence[int]) -> list[int]:
        found = []
        parent = 0
        for start in range(0, len(tokens), self.size):
            block = array("q", tokens[start : start + self.size]).tobytes()
            parent = self._known.setdefault((parent, block), len(self._known) + 1)
            found.append(parent)
        return found
