"""Where a modelled session gets attention from: it computes none, so somebody who measured it has to say."""

from __future__ import annotations

from typing import Protocol

from kvtape.backends.protocol import AttentionMass
from kvtape.planner.layout import Layout

__all__ = ["ScoreSource"]


class ScoreSource(Protocol):
    """Raises UsageError for attention that nobody measured; never makes any up."""

    def accumulated(self, layout: Layout, tape_length: int) -> AttentionMass:
        """What was paid to the resident rows since the last call."""

    def window(self, layout: Layout, tape_start: int, queries: int) -> AttentionMass:
        """What the `queries` tokens from `tape_start` on paid to the rows before them."""
