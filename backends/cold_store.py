"""The cold store: exported blocks on the host, within a budget, trimmed in a stated order.

Entries are keyed by block id, never by range: ranges recur after a truncation, ids do not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvtape.backends.cold_identity import BlockIdentity
from kvtape.backends.protocol import SessionConfig
from kvtape.planner.blocks import CacheClass

__all__ = ["ColdEntry", "ColdStore", "open_store"]


def open_store(config: SessionConfig) -> ColdStore | None:
    """The store that a session was configured with; None for a budget of no tokens."""
    if not config.cold_budget_tokens:
        return None
    return ColdStore(config.cold_budget_tokens, config.cold_budget_bytes or None)


@dataclass(frozen=True, slots=True)
class ColdEntry:
    """One exported block; `last_used` is the session's logical clock, `blob` an envelope, `identity` what it copies."""

    block_id: int
    start: int
    stop: int
    cache_class: CacheClass
    last_used: int
    blob: bytes
    identity: BlockIdentity

    @property
    def n_tokens(self) -> int:
        return self.stop - self.start


class ColdStore:
    """Blocks within `budget_tokens` and, when given, `budget_bytes`."""

    def __init__(self, budget_tokens: int, budget_bytes: int | None = None) -> None:
        if budget_tokens <= 0 or (budget_bytes is not None and budget_bytes <= 0):
            raise ValueError("a cold store needs a positive budget")
        self.budget_tokens = budget_tokens
        self.budget_bytes = budget_bytes
        self._entries: dict[int, ColdEntry] = {}

    @property
    def n_tokens(self) -> int:
        return sum(e.n_tokens for e in self._entries.values())

    @property
    def n_bytes(self) -> int:
        return sum(len(e.blob) for e in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, block_id: int) -> ColdEntry | None:
        return self._entries.get(block_id)

    def too_large(self, n_tokens: int, n_bytes: int) -> bool:
        """Whether one block of this size could never be kept."""
        return n_tokens > self.budget_tokens or (self.budget_bytes is not None and n_bytes > self.budget_bytes)

    def put(self, entry: ColdEntry) -> None:
        """Insert without trimming. Raises ValueError for an id that is there or a block that can never fit."""
        if entry.block_id in self._entries:
            raise ValueError(f"block {entry.block_id} is already cold")
        if self.too_large(entry.n_tokens, len(entry.blob)):
            raise ValueError(f"block {entry.block_id} is larger than the whole budget")
        self._entries[entry.block_id] = entry

    def trim(self, newest: int) -> list[int]:
        """Drop entries while over budget: more evictable class, then older, then smaller start.

        Never `newest`, the block just inserted, which fits alone. Returns the dropped ids in order.
        """
        pool = sorted(
            (e for e in self._entries.values() if e.block_id != newest),
            key=lambda e: (-e.cache_class.rank, e.last_used, e.start, e.block_id),
        )
        dropped: list[int] = []
        while self._over():
            dropped.append(pool[len(dropped)].block_id)
            del self._entries[dropped[-1]]
        return dropped

    def pop(self, block_id: int) -> ColdEntry:
        """Remove and return. Raises KeyError for an unknown id."""
        return self._entries.pop(block_id)

    def keep_only(self, block_ids: Collection[int]) -> None:
        """Forget every block whose id is not in `block_ids` (the fold said what is still valid)."""
        alive = frozenset(block_ids)
        self._entries = {i: e for i, e in self._entries.items() if i in alive}

    def clear(self) -> None:
        self._entries.clear()

    def _over(self) -> bool:
        over_bytes = self.budget_bytes is not None and self.n_bytes > self.budget_bytes
        return self.n_tokens > self.budget_tokens or over_bytes
