"""Tokens into text that can be sent: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["StopStrings", "TextStream"]

_LONGEST_CHARACTER = 4
"""Bytes of a UTF-8 character at most, and so tokens that may have to be waited for."""


class TextStream:
    """Detokenises one token at a time. A character that spans tokens comes with its last one.

    A token's text may depend on the ones before it (a leading space), so a window of them is spelled each time.
    """

    def __init__(self, detokenize: Callable[[Sequence[int]], str]) -> None:
        self._spell = detokenize
        self._before: list[int] = []
        self._waiting: list[int] = []

    def add(self, token: int) -> str:
        """The text that is complete now; empty while a character is not."""
        self._waiting.append(token)
        text = self._new_text()
        if not text.endswith("�"):
            return self._let_go(len(self._waiting), text)
        # The last three tokens may still be the beginning of a character; what is before them is none.
        return self._let_go(max(0, len(self._waiting) - _LONGEST_CHARACTER + 1))

    def rest(self) -> str:
        """What never became whole, with replacement characters."""
        return self._let_go(len(self._waiting))

    def _let_go(self, n: int, text: str | None = None) -> str:
        """The text of the first `n` tokens that wait, which wait no more; `text` where it is known already."""
        if not n:
            return ""
        text = self._new_text(n) if text is None else text
        self._before, self._waiting = self._waiting[:n], self._waiting[n:]
        return text

    def _new_text(self, n: int | None = None) -> str:
        """The text of the first `n` tokens that wait, all by default."""
        known = self._spell(self._before) if self._before else ""
        return self._spell([*self._before, *self._waiting[:n]])[len(known) :]


class StopStrings:
    """Lets text through up to the first of `stops` to be complete; holds back what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def add(self, text: str) -> str:
        """What may be sent now. After a hit nothing more comes."""
        if self.hit:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was held back, when the text has ended without a hit."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """The longest end of `text` that `stop` begins with."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
