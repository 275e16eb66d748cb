"""Needles: a fact to plant in a text, the question that asks for it, and what counts as an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtape.backends.errors import UsageError
from kvtape.eval.filler import Draws
from kvtape.planner.grammar import nearest

__all__ = ["FORMATS", "Needle", "draw_needle", "is_correct"]

_CITIES = (
    "Athens", "Berlin", "Boston", "Cairo", "Chicago", "Dublin", "Geneva", "Houston", "Lisbon", "London", "Madrid",
    "Moscow", "Oslo", "Paris", "Prague", "Rome", "Sydney", "Tokyo", "Toronto", "Vienna",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Needle:
    """`fact` begins with a space; `question` ends where the answer begins; `answer` without a space before it."""

    fact: str
    question: str
    answer: str


def draw_needle(name: str, seed: int) -> Needle:
    """The needle of this format and seed. Raises UsageError for a format that is not there."""
    if name not in FORMATS:
        raise UsageError(f"unknown format {name!r}{nearest(name, FORMATS)} allowed: {', '.join(sorted(FORMATS))}")
    return FORMATS[name](Draws(seed, stream=2))


def is_correct(needle: Needle, said: str) -> bool:
    """Whether the text generated behind the question begins with the answer, as a whole word."""
    text = said.lstrip()
    rest = text.removeprefix(needle.answer)
    return rest != text and not rest[:1].isalnum()


def _city(draws: Draws) -> Needle:
    city = draws.pick(_CITIES)
    return Needle(
        fact=f" Mary's favorite city is {city}.",
        question="\nQuestion: What is Mary's favorite city? Answer: Mary's favorite city is",
        answer=city,
    )


def _passkey(draws: Draws) -> Needle:
    key = str(10_000 + draws.below(90_000))
    return Needle(
        fact=f" The pass key is {key}. Remember it. {key} is the pass key.",
        question="\nWhat is the pass key? The pass key is",
        answer=key,
    )


FORMATS: dict[str, Callable[[Draws], Needle]] = {"city": _city, "passkey": _passkey}
"""`city`: by chance 1 in 20 is right; `passkey`: 1 in 90,000."""
