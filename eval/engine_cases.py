"""What KV engines are judged on: prompts, and the tokens put behind them, whatever an engine would have said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.backends.errors import UsageError

__all__ = ["QUESTION_TOKENS", "EngineCase", "text_cases"]

QUESTION_TOKENS = 16
"""Of a prompt, for an engine that answers from a store: its last tokens are the question, the others the context."""


@dataclass(frozen=True, slots=True)
class EngineCase:
    """`continuation`: the tokens behind `prompt`, one more than there are steps; None for those of `standard`."""

    name: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...] | None = None

    @property
    def context_and_question(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        cut = max(0, len(self.prompt) - QUESTION_TOKENS)
        return self.prompt[:cut], self.prompt[cut:]


def text_cases(name: str, tokens: Sequence[int], *, n: int, prompt_tokens: int, steps: int) -> list[EngineCase]:
    """`n` stretches of a text, evenly spread and apart from each other: a prompt and the text's own `steps + 1` tokens.

    Raises UsageError where the text is too short for that.
    """
    size = prompt_tokens + steps + 1
    if n * size > len(tokens):
        fit = len(tokens) // size
        lower = f"lower --prompts to {fit}" if fit else "lower --prompt-tokens and --steps"
        raise UsageError(
            f"{name}: {len(tokens)} tokens are too few for {n} prompts of {prompt_tokens} and {steps + 1} behind each; "
            f"{lower}, or give a longer text"
        )
    starts = [i * (len(tokens) - size) // max(1, n - 1) for i in range(n)]
    return [
        EngineCase(
            f"{name}:{start}",
            tuple(tokens[start : start + prompt_tokens]),
            tuple(tokens[start + prompt_tokens : start + size]),
        )
        for start in starts
    ]
