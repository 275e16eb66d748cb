"""What engines save of a session as bytes of their own, and how its header is read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtape.backends.books import Books
from kvtape.backends.errors import InputRejected, StateRejected

__all__ = ["SavedBlock", "SavedState", "read_books", "read_count"]


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """One run of rows: its tape start, where it stood in the cache, its tokens, the engine's bytes."""

    start: int
    cache_start: int
    tokens: list[int]
    payload: bytes

    def header(self) -> dict[str, Any]:
        """All but the bytes, by name."""
        return {"start": self.start, "cache_start": self.cache_start, "tokens": self.tokens}


@dataclass(frozen=True, slots=True)
class SavedState:
    """A whole session: its books and the engine's bytes."""

    books: Books
    payload: bytes


def read_count(header: Mapping[str, Any], key: str) -> int:
    """Raises StateRejected for anything but a whole number of at least 0."""
    value = header.get(key)
    if not isinstance(value, int) or value < 0:
        raise StateRejected(f"saved state has {key} {value!r}, a count is needed")
    return value


def read_books(header: Mapping[str, Any]) -> Books:
    """Those of `segments`. Raises StateRejected."""
    try:
        return Books.from_json(header["segments"])
    except (InputRejected, KeyError, TypeError, ValueError) as err:
        raise StateRejected(f"saved state has no readable segments: {err}") from None
