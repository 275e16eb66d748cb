"""A chat as a plain transcript, `role: content`, so that any model can read it: what stands on the tape for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtape.planner.blocks import PromptSegment

__all__ = ["Transcript"]


class Transcript:
    """A chat as it grows, in tokens. `cue` stands before an answer, `blank` behind it."""

    def __init__(self, tokenize: Callable[[str], Sequence[int]]) -> None:
        self._tokenize = tokenize
        self._said: list[PromptSegment] = []
        self.cue = self._segment("assistant_prompt", "assistant:")
        self.blank = self._segment("assistant", "\n\n")

    def message(self, role: str, content: str) -> PromptSegment:
        """A message as it stands on the tape; nothing is said by this."""
        return self._segment(role, f"{role}: {content}\n\n")

    def say(self, message: PromptSegment) -> None:
        self._said.append(message)

    def said(self) -> list[PromptSegment]:
        """All that was said."""
        return list(self._said)

    def offer(self) -> list[PromptSegment]:
        """All that was said, and the cue: a prompt that asks for an answer."""
        return [*self._said, self.cue]

    def answered(self, tokens: Sequence[int]) -> None:
        """Keep an answer as it was generated; an empty one too was given."""
        answer = [PromptSegment(kind="assistant", tokens=tuple(tokens))] if tokens else []
        self._said += [self.cue, *answer, self.blank]

    def _segment(self, kind: str, text: str) -> PromptSegment:
        return PromptSegment(kind=kind, tokens=tuple(self._tokenize(text)))
