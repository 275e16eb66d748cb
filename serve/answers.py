"""The tokens behind answers that were given: a client sends a text back, and spelled anew it may be other tokens.

Without this an answer is a place where the next prompt departs from the tape, and all behind it is computed again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

__all__ = ["AnswerMemory"]


class AnswerMemory:
    """The last `size` answers, by their text. Thread-safe."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._tokens: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def remember(self, text: str, tokens: tuple[int, ...]) -> None:
        """`tokens` spell `text` exactly; of two answers with one text the later one counts."""
        if not text:
            return
        with self._lock:
            self._tokens[text] = tokens
            self._tokens.move_to_end(text)
            if len(self._tokens) > self._size:
                self._tokens.popitem(last=False)

    def tokens_of(self, text: str) -> tuple[int, ...] | None:
        """None for a text that was not, or long ago, an answer."""
        with self._lock:
            return self._tokens.get(text)
