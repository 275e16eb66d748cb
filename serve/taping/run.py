"""One uninterrupted run of generated tokens, held back until it is known which of its tokens stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["RUN_TOKENS", "OpenRun"]

RUN_TOKENS = 32
"""A run is recorded at the latest with so many tokens, as a session records its own: a kill loses at most these."""


@dataclass(slots=True)
class OpenRun:
    """Tokens at cache positions from `at`; those from `settled` on are proposals of the last call that wait for a
    verdict. `said`: what was sampled since that call; a proposal that was sampled too is accepted.
    """

    at: int
    began_ns: int
    tokens: list[int] = field(default_factory=list)
    settled: int = 0
    said: list[int] = field(default_factory=list)
    elapsed_ns: int = 0
    calls: int = 0
    accepted: int = 0
    rejected: int = 0

    @property
    def end(self) -> int:
        return self.at + len(self.tokens)

    @property
    def waiting(self) -> int:
        """Proposals without a verdict."""
        return len(self.tokens) - self.settled

    def call(self, tokens: Sequence[int], elapsed_ns: int) -> None:
        """One call of the engine: a generated token, and what was proposed behind it. None may wait."""
        self.tokens.extend(tokens)
        self.settled += 1
        self.said = []
        self.elapsed_ns += elapsed_ns
        self.calls += 1

    def verdict(self) -> int:
        """Settle the proposals that were sampled; how many others are still in the engine."""
        proposed = self.tokens[self.settled :]
        agreed = 0
        while agreed < min(len(proposed), len(self.said)) and proposed[agreed] == self.said[agreed]:
            agreed += 1
        self.settled += agreed
        self.accepted += agreed
        self.said = []
        return self.waiting

    def cut(self, position: int) -> bool:
        """Rows from `position` on are gone; False, and nothing changed, where that is more than refused proposals."""
        if position < self.at + self.settled or position > self.end:
            return position > self.end
        self.rejected += self.end - position
        del self.tokens[position - self.at :]
        return True
