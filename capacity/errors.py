"""What this room raises. Each message is one line that names the file, the key or the value, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

__all__ = ["CapacityError", "ModelFileError", "nearest"]


class CapacityError(ValueError):
    """A setting, a type or an engine that sizes cannot be computed for."""


class ModelFileError(ValueError):
    """The file is missing, not a model, damaged, or lacks what is asked of it."""


def nearest(given: str, names: Sequence[str]) -> str:
    """Between an unknown name and the list of `names`, in the planner's words, which this room does not import."""
    near = get_close_matches(given, names, n=1)
    return f", did you mean {near[0]!r}?" if near else ";"
