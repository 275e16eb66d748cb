"""How long work on a log tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Tell", "silent", "tell_of"]

Tell = Callable[[int, int, str], None]
"""Called with how much is done, of how much (0: not known), and of what."""


def silent(done: int, total: int, what: str) -> None:
    """Nobody listens."""


def tell_of(tell: Tell, name: str) -> Tell:
    """The same listener, told of `name` whatever is done."""
    return lambda done, total, what: tell(done, total, name)
