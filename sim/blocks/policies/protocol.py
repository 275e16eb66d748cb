"""What a policy is: a cache that decides by itself what it keeps within its budget."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Policy", "PolicyClass"]


class Policy(Protocol):
    """A cache of blocks, empty at first. Blocks are whole numbers from 0.

    `access` may keep and evict as it likes, as long as `len` never exceeds the budget after a request.
    """

    def access(self, block: int) -> bool:
        """Whether the block was there, before anything is admitted or evicted for it."""

    def __contains__(self, block: int) -> bool: ...

    def __len__(self) -> int:
        """Blocks held now."""


class PolicyClass(Protocol):
    """How one is made: with its budget in blocks."""

    def __call__(self, budget: int) -> Policy: ...
