"""What this room raises. Each message is one line that names the file, the policy or the number, and the remedy."""

from __future__ import annotations

from typing import ClassVar

__all__ = ["CurveError", "NoBlocks", "PolicyBroken"]


class CurveError(Exception):
    """Bad input of a curve."""

    exit_code: ClassVar[int] = 2


class NoBlocks(CurveError):
    """The source says nothing of what its prompts share."""


class PolicyBroken(CurveError):
    """A policy of the user's own did what no cache can do."""
