"""Which of the three ways to carry out an evict a session can go."""

from __future__ import annotations

from typing import Literal

from kvtape.planner.capabilities import Capabilities
from kvtape.planner.events import Way

__all__ = ["Positions", "available_ways"]

Positions = Literal["auto", "gap", "rebased"]
"""What a policy asks of cache positions: keep the holes, close them, or leave the choice to the session."""

_ASKED: dict[str, tuple[Way, ...]] = {
    "auto": (Way.GAP, Way.REBASED, Way.RECOMPUTE),
    "gap": (Way.GAP, Way.RECOMPUTE),
    # A rebuild leaves contiguous positions too, so it answers a wish for rebased ones.
    "rebased": (Way.REBASED, Way.RECOMPUTE),
}


def available_ways(
    capabilities: Capabilities, allow_recompute: bool = False, positions: Positions = "auto"
) -> tuple[Way, ...]:
    """The executable ways, cheapest first; empty when nothing can be evicted.

    gap needs remove_middle; rebased needs remove_middle and position_shift; recompute needs recompute_range and
    the session's leave (`allow_recompute`), for it costs the survivors' prefill.
    """
    possible = {
        Way.GAP: capabilities.remove_middle,
        Way.REBASED: capabilities.remove_middle and capabilities.position_shift,
        Way.RECOMPUTE: capabilities.recompute_range and allow_recompute,
    }
    return tuple(way for way in _ASKED[positions] if possible[way])
