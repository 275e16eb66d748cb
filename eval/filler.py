"""Filler: plain sentences about a village, drawn from a seed, that say nothing a question asks for.

A draw is SplitMix64 of (seed, number of the draw), so that a text is the same on every machine and Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

__all__ = ["Draws", "sentences"]

_T = TypeVar("_T")
_MASK = 2**64 - 1

_WHO = (
    "The gardener", "A young teacher", "The baker", "An old sailor", "The night watchman", "My neighbour",
    "The miller", "A tall stranger", "The librarian", "The shepherd", "Her brother", "The carpenter",
    "A quiet child", "The doctor", "The postman", "An aunt of ours", "The beekeeper", "The ferryman",
)  # fmt: skip
_DID = (
    "carried a basket of pears", "mended the broken gate", "told a long story about the sea", "looked for the lost key",
    "painted the wooden boat", "counted the sheep twice", "read a letter by the window", "swept the leaves",
    "played a slow tune on the fiddle", "cut bread for the guests", "watched the clouds go by", "fed the grey horse",
    "wrote a few lines in a notebook", "hung the washing out to dry", "planted a row of beans", "lit the lamp",
    "sharpened the old knife", "stacked the firewood", "boiled water for tea", "cleaned the dusty shelves",
)  # fmt: skip
_WHERE = (
    "behind the barn", "near the stone bridge", "in the cold kitchen", "at the edge of the forest", "by the river",
    "under the chestnut tree", "in front of the chapel", "on the narrow path", "beside the pond", "in the back yard",
    "at the top of the hill", "next to the mill", "across the meadow", "in the small workshop", "along the low wall",
)  # fmt: skip
_WHEN = (
    "before the rain came", "while the dog slept", "until it was dark", "as the bells rang", "after a short rest",
    "when the wind turned", "although nobody had asked", "because there was time", "and then went home",
    "without saying a word", "and smiled at everyone", "as on every other day", "while the children sang",
    "before the market opened", "and thought of the summer", "since the work was done",
)  # fmt: skip


class Draws:
    """Seeded draws, one after another."""

    def __init__(self, seed: int, stream: int = 0) -> None:
        """`stream` keeps the draws for different purposes apart under one seed."""
        self._state = _mix((seed * 1_000_003 + stream) & _MASK)

    def below(self, n: int) -> int:
        """A whole number in `[0, n)`."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        return _mix(self._state) % n

    def pick(self, items: Sequence[_T]) -> _T:
        return items[self.below(len(items))]


def sentences(seed: int) -> Iterator[str]:
    """Endless sentences, none of them directly after itself; each begins with a space."""
    draws = Draws(seed, stream=1)
    last = ""
    while True:
        text = f" {draws.pick(_WHO)} {draws.pick(_DID)} {draws.pick(_WHERE)} {draws.pick(_WHEN)}."
        if text != last:
            yield text
        last = text


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
