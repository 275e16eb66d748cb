"""Putting wrappers in front of an object's methods, and taking them away again."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Final

__all__ = ["Patches"]

_ABSENT: Final = object()


class Patches:
    """Wrappers on objects or classes. `undo` puts back what stood there, the last one first. Idempotent."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Set `owner.name` to `make(what is there now)`. Raises what setting an attribute raises."""
        before = vars(owner).get(name, _ABSENT)
        original = getattr(owner, name)
        wrapper = functools.update_wrapper(make(original), original)
        setattr(owner, name, wrapper)
        self._made.append((owner, name, before, wrapper))

    def undo(self) -> None:
        """A method that somebody else wrapped meanwhile is left as it is, with a warning: it still calls through."""
        while self._made:
            owner, name, before, wrapper = self._made.pop()
            if vars(owner).get(name, _ABSENT) is not wrapper:
                text = f"{name} was replaced while it was captured; the newer one stays, and calls what it found"
                warnings.warn(text, RuntimeWarning, stacklevel=4)
            elif before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
