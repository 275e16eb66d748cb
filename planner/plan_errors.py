"""Why inputs cannot be planned. `PlanError` is the base; each message names the block or the number at fault."""

from __future__ import annotations

__all__ = ["BadBudget", "BadScore", "BadSpan", "InvalidBlock", "OverlappingBlocks", "PlanError"]


class PlanError(ValueError):
    """The inputs cannot be planned; the message names the block or the number at fault."""


class BadBudget(PlanError):
    """A budget that is negative, zero or no whole number: an empty cache is never planned in silence."""


class BadSpan(PlanError):
    """A negative sink, recent or grace span."""


class InvalidBlock(PlanError):
    """A block that is empty, negative, past 63 bits, or bears an id that another block has."""


class OverlappingBlocks(PlanError):
    """Two blocks that share tape positions."""


class BadScore(PlanError):
    """A score that is NaN or infinite."""
