"""The text of the likelihood task: a given one, or as many seeded sentences as are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtape.backends.errors import UsageError
from kvtape.eval.filler import sentences

__all__ = ["long_text", "tokens_of"]

_AT_ONCE = 20


def long_text(tokenize: Callable[[str], Sequence[int]], seed: int, n_tokens: int) -> tuple[int, ...]:
    """Exactly `n_tokens` tokens of sentences that no two seeds share in this order."""
    stream = sentences(seed)
    tokens: list[int] = []
    while len(tokens) < n_tokens:
        tokens += tokenize("".join(next(stream) for _ in range(_AT_ONCE)))
    return tuple(tokens[:n_tokens])


def tokens_of(tokenize: Callable[[str], Sequence[int]], text: str, n_tokens: int | None) -> tuple[int, ...]:
    """The text's tokens, or the first `n_tokens` of them. Raises UsageError when there are fewer."""
    tokens = tuple(tokenize(text))
    if n_tokens is not None and len(tokens) < n_tokens:
        raise UsageError(f"the text has {len(tokens)} tokens, --tokens asks for {n_tokens}")
    return tokens if n_tokens is None else tokens[:n_tokens]
