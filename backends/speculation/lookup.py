"""Prompt lookup: what followed the last time that the tape ended as it ends now (prompt lookup decoding, Saxena 2023).

Texts that quote their prompt, code and lists repeat themselves; where they do, the tape is as good as a model.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PromptLookup"]


class PromptLookup:
    """Looks for the longest ending of 1 to `ngram` tokens that stood on the tape before, the last time it did.

    Proposes up to `tokens` of what followed there. What it knows grows with the tape and is made anew behind a cut.
    """

    def __init__(self, *, ngram: int = 3, tokens: int = 8) -> None:
        self.spec = f"lookup:ngram={ngram},tokens={tokens}"
        self._ngram, self._tokens = ngram, tokens
        self._tape: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def draft(self, tape: Sequence[int], at_most: int) -> Sequence[int]:
        """See `Drafter`."""
        found = self._follow(tape)
        for n in range(min(self._ngram, len(found) - 1), 0, -1):
            at = self._after.get(tuple(found[-n:]))
            if at is not None:
                return found[at : at + min(self._tokens, at_most)]
        return ()

    def _follow(self, tape: Sequence[int]) -> list[int]:
        """Make what is known that of `tape`: where each run of tokens that ends before its last token goes on."""
        now = list(tape)
        known = len(self._tape)
        if now[:known] != self._tape:
            known, self._after = 0, {}
        for end in range(max(known, 1), len(now)):
            for n in range(1, min(self._ngram, end) + 1):
                self._after[tuple(now[end - n : end])] = end
        self._tape = now
        return now

    def close(self) -> None:
        """See `Drafter`."""
        self._tape, self._after = [], {}
