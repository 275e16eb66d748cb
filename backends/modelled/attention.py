"""Where a modelled session has its attention scores from: nobody computes any, somebody has to have recorded them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtape.backends.protocol import AttentionMass
from kvtape.planner.layout import Layout

__all__ = ["Attention"]


class Attention(Protocol):
    """Attention of one session's queries, by tape position. It raises what it cannot answer, and never makes it up."""

    def computed(self, start: int, stop: int, before: Layout, *, again: bool = False) -> None:
        """The queries of `[start, stop)` were computed over the rows of `before` and their own.

        `again`: only to have their rows back, by a refill or a rebuild.
        """

    def cut(self, tape_stop: int) -> None:
        """The tape ends at `tape_stop` from now on."""

    def taken(self, layout: Layout) -> AttentionMass:
        """See `protocol.Backend.take_mass`; of the rows of `layout`."""

    def window(self, start: int, stop: int, layers: Sequence[int] | None, layout: Layout) -> AttentionMass:
        """What the queries of `[start, stop)`, the tape's last, pay to the rows of `layout` before `start`."""

    def later(self, layout: Layout) -> AttentionMass:
        """What all queries that are still to come will pay to the rows of `layout`."""
