"""Block ids of one size as block ids of another, so that two prompts share as many of them as they share tokens.

    same size   the ids as they are
    larger      a block is the chain over all ids up to its end
    smaller     a block is (id, part)

A partial last block gets an id: that of its part where the ids say what it holds, else one that no other prompt has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvtape.traces.errors import TraceError

__all__ = ["Reblocker"]


class Reblocker:
    """Keeps ids small and dense, in the order in which they are first seen; ids of the same size stay as they are."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._dense: dict[bytes, int] = {}
        self._unknown = 0

    def ids(self, hashes: Sequence[int], n_tokens: int, block_tokens: int) -> list[int]:
        """Ids of ceil(n_tokens / size) blocks. Raises TraceError where the sizes do not divide each other."""
        wanted = -(-n_tokens // self.size)
        if block_tokens == self.size and len(hashes) == wanted:
            return list(hashes)
        if block_tokens <= self.size and self.size % block_tokens == 0:
            return self._larger(hashes, wanted, n_tokens, block_tokens)
        if block_tokens % self.size == 0:
            return self._smaller(hashes, wanted, block_tokens)
        raise TraceError(
            f"blocks of {block_tokens} tokens cannot be written as blocks of {self.size}"
            "; choose another --format, such as jsonl"
        )

    def _larger(self, hashes: Sequence[int], wanted: int, n_tokens: int, block_tokens: int) -> list[int]:
        per, chain, made = self.size // block_tokens, b"", list[int]()
        for k in range(wanted):
            part = hashes[k * per : (k + 1) * per]
            chain = hashlib.blake2b(chain + b"".join(h.to_bytes(8) for h in part), digest_size=16).digest()
            covered = -(-(min(n_tokens, (k + 1) * self.size) - k * self.size) // block_tokens)
            made.append(self._number(chain) if len(part) == covered else self._fresh())
        return made

    def _smaller(self, hashes: Sequence[int], wanted: int, block_tokens: int) -> list[int]:
        per, made = block_tokens // self.size, list[int]()
        for k in range(-(-wanted // per)):
            block = self._number(hashes[k].to_bytes(8)) if k < len(hashes) else self._fresh()
            made += range(block * per, block * per + min(per, wanted - k * per))
        return made

    def _number(self, key: bytes) -> int:
        return self._dense.setdefault(key, len(self._dense))

    def _fresh(self) -> int:
        self._unknown += 1
        return self._number(b"unknown" + self._unknown.to_bytes(8))
