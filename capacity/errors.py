"""What this room raises. Each message is one line that names the file, the key or the value, and what to do."""

from __future__ import annotations

__all__ = ["CapacityError", "ModelFileError"]


class CapacityError(ValueError):
    """A setting, a type or an engine that sizes cannot be computed for."""


class ModelFileError(ValueError):
    """The file is missing, not a model, damaged, or lacks what is asked of it."""
