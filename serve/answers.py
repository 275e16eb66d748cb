"""The tokens behind answers that were given: a client sends a text back, and spelled anew it may be other tokens.

Without this an answer is a place where the next prompt departs from the tape, and all behind it is computed again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

__all__ = ["AnswerMemory"]

_MOST_TOKENS = 1 << 20
"""Some 40 MB, however long the answers and however many the clients."""


class AnswerMemory:
    """The last answers, by their text: at most `size`, of at most `tokens` tokens together. Thread-safe."""

    def __init__(self, size: int = 4096, tokens: int = _MOST_TOKENS) -> None:
        self._size = size
        self._most = tokens
        self._held = 0
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[tuple[int, ...], str]] = OrderedDict()

    def remember(self, text: str, tokens: tuple[int, ...], rest: str = "") -> None:
        """`tokens` spell `text` up to `rest` exactly; of two answers with one text the later one counts."""
        if not text:
            return
        with self._lock:
            self._forget(text)
            self._known[text] = (tokens, rest)
            self._held += len(tokens)
            while len(self._known) > self._size or self._held > self._most:
                self._forget(next(iter(self._known)))

    def tokens_of(self, text: str) -> tuple[tuple[int, ...], str] | None:
        """The tokens, and the text behind them; None for a text that was not, or long ago, an answer."""
        with self._lock:
            return self._known.get(text)

    def _forget(self, text: str) -> None:
        tokens, _ = self._known.pop(text, ((), ""))
        self._held -= len(tokens)
