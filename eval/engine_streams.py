"""Engines against a loop that is none: the same tokens, whatever keeps the cache."""

from __future__ import annotations

from collections.abc import Sequence

from kvtape.backends.reference.engines.harness import Harness
from kvtape.backends.reference.engines.registry import parse_engine
from kvtape.backends.reference.model.cached_loop import generate_cached
from kvtape.backends.reference.model.weights import Weights

__all__ = ["parted_streams"]


def parted_streams(weights: Weights, prompt: Sequence[int], n: int, window: int) -> dict[str, int | None]:
    """For the engines that `--kv-cache` names: the first of `n` greedy tokens that is not `generate_cached`'s, or None.

    `standard` and `none` against the loop without a window, `markov-bounded` against it with one of `window` rows.
    """
    free, bounded = generate_cached(weights, prompt, n), generate_cached(weights, prompt, n, window)
    specs = {
        "standard": ("standard", free),
        "markov-bounded": (f"standard:window={window}", bounded),
        "none": ("no-cache", free),
    }
    found: dict[str, int | None] = {}
    for kind, (spec, want) in specs.items():
        got = Harness(parse_engine(spec), weights).greedy(prompt, n)
        found[kind] = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None)
    return found
