"""Keyed hashes of what is on a session's tape, so that a log without content still shows what was shared.

    h_k = blake2b-8(key, h_{k-1} + token ids of tape block k)         blocks of 32 tokens from position 0

Two tapes with one prefix have the same hashes up to the last whole block of it, under one key; without the key
nobody can test a guessed text against them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from kvtape.planner.events import Event, Op

__all__ = ["BLOCK_TOKENS", "TOKEN_OPS", "Tape", "content_mac"]

BLOCK_TOKENS = 32
_HASH_BYTES = 8
_MAC_BYTES = 16

TOKEN_OPS = frozenset({Op.PREFILL, Op.DECODE, Op.RECOMPUTE})
"""The events that bring tokens; each gets a row in `tokens`."""


def content_mac(key: bytes, start: int, tokens: Sequence[int]) -> str:
    """Keyed hash (hex) of the tokens of one row and of where they stand: what the hash chain covers of content."""
    raw = start.to_bytes(8, "little") + array("i", tokens).tobytes()
    return hashlib.blake2b(raw, digest_size=_MAC_BYTES, key=key, person=b"kvtape content").hexdigest()


class Tape:
    """One session's tokens as far as the log has seen them, and the hash of every whole block.

    A tape that is not known (tokens were lost, or a session goes on in another process without stored content)
    gives no hashes rather than wrong ones.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._tokens = array("i")
        self._chain: list[bytes] = []
        self._snapshots: dict[int, tuple[array[int], list[bytes]]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def follow(self, event: Event, tokens: Sequence[int] | None) -> list[str]:
        """Apply the event. Returns the hashes (hex) of the whole blocks that it touched and, when the event ends
        inside a block, one more for that block up to the event's end; nothing where the tape is not known.
        """
        if event.op == Op.TRUNCATE and event.start is not None:
            self._cut(event.start)
        elif event.op == Op.LOST:
            self._cut(0)
        elif event.op == Op.CLOSE:  # a recorder outlives its sessions
            self._cut(0)
            self._snapshots.clear()
        elif event.op == Op.SNAPSHOT and event.snapshot_id is not None:
            self._snapshots[event.snapshot_id] = (self._tokens[:], self._chain[:])
        elif event.op == Op.RESTORE and event.snapshot_id is not None:
            saved, chain = self._snapshots.get(event.snapshot_id, (array("i"), []))
            self._tokens, self._chain = saved[:], chain[:]
        elif event.op in TOKEN_OPS and tokens is not None and event.start is not None:
            return self._touch(event.op, event.start, tokens)
        return []

    def _cut(self, length: int) -> None:
        del self._tokens[length:]
        del self._chain[length // BLOCK_TOKENS :]

    def _touch(self, op: Op, start: int, tokens: Sequence[int]) -> list[str]:
        stop = start + len(tokens)
        if op != Op.RECOMPUTE and start == len(self._tokens):
            self._tokens.extend(tokens)
            self._extend_chain()
        elif stop > len(self._tokens) or self._tokens[start:stop] != array("i", tokens):
            return []
        first, whole = start // BLOCK_TOKENS, stop // BLOCK_TOKENS
        hashes = self._chain[first:whole]
        if stop % BLOCK_TOKENS:
            hashes = [*hashes, self._hash(whole, stop)]
        return [h.hex() for h in hashes]

    def _extend_chain(self) -> None:
        for block in range(len(self._chain), len(self._tokens) // BLOCK_TOKENS):
            self._chain.append(self._hash(block, (block + 1) * BLOCK_TOKENS))

    def _hash(self, block: int, stop: int) -> bytes:
        """Of tape block `block` up to position `stop`, over the hash of the block before."""
        before = self._chain[block - 1] if block else bytes(_HASH_BYTES)
        part = self._tokens[block * BLOCK_TOKENS : stop].tobytes()
        return hashlib.blake2b(before + part, digest_size=_HASH_BYTES, key=self._key).digest()
