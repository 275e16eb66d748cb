"""Prompts of a comparison, and the text behind each: stretches of a given text, or sentences from seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtape.backends.errors import UsageError
from kvtape.eval.batching.tracks import Prompt
from kvtape.eval.texts import long_text

__all__ = ["prompts_from_seeds", "prompts_from_text"]

_SPARE = 4
"""Times the tokens that are asked for: the comparator may cut a text into smaller tokens than its own tokenizer."""

Tokenize = Callable[[str], Sequence[int]]
Detokenize = Callable[[Sequence[int]], str]


def prompts_from_seeds(
    tokenize: Tokenize, detokenize: Detokenize, seeds: range, n_tokens: int, n_new: int
) -> tuple[Prompt, ...]:
    """One prompt a seed, of `n_tokens` tokens; no two seeds share their sentences in this order."""
    found = []
    for seed in seeds:
        tokens = long_text(tokenize, seed, n_tokens + _SPARE * n_new)
        found.append(Prompt(f"seed {seed}", tokens[:n_tokens], detokenize(tokens[n_tokens:])))
    return tuple(found)


def prompts_from_text(
    tokenize: Tokenize, detokenize: Detokenize, text: str, places: range, n_tokens: int, n_new: int
) -> tuple[Prompt, ...]:
    """Prompt i is the i-th stretch of `n_tokens` tokens of `text`. Raises UsageError when there are too few."""
    tokens = tuple(tokenize(text))
    needed = places.stop * n_tokens + _SPARE * n_new
    if len(tokens) < needed:
        raise UsageError(
            f"the text has {len(tokens)} tokens, and {places.stop} prompts of {n_tokens} with what follows the last "
            f"need {needed}; lower --tokens or --new-tokens, or ask for fewer --seeds"
        )
    found = []
    for i in places:
        start, stop = i * n_tokens, (i + 1) * n_tokens
        # A character may be cut by the border; its rest cannot be spelled.
        behind = detokenize(tokens[stop : stop + _SPARE * n_new]).lstrip("\ufffd").partition("\ufffd")[0]
        found.append(Prompt(f"stretch {i}", tokens[start:stop], behind))
    return tuple(found)
