"""A prompt of the needle task: filler with the fact at a seeded place of its region, and the question behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtape.backends.errors import UsageError
from kvtape.eval.filler import Draws, sentences
from kvtape.eval.needles import Needle, draw_needle
from kvtape.eval.places import Regions

__all__ = ["NeedlePrompt", "needle_prompt"]

Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class NeedlePrompt:
    """`context` with the fact at tape positions `[start, stop)`; `question` is not part of it. Token ids."""

    seed: int
    region: str
    context: tuple[int, ...]
    question: tuple[int, ...]
    start: int
    stop: int
    needle: Needle
    answer_tokens: int


def needle_prompt(
    tokenize: Tokenize, *, format_name: str, seed: int, region: str, regions: Regions, n_tokens: int
) -> NeedlePrompt:
    """At most `n_tokens` of whole sentences, one of them the fact, with its place drawn among the sentence ends that
    leave it wholly inside its region. The same seed has the same sentences in every region.

    Raises UsageError when the fact fits nowhere.
    """
    needle = draw_needle(format_name, seed)
    fact = tuple(tokenize(needle.fact))
    filler: list[tuple[int, ...]] = []
    ends = [0]
    for text in sentences(seed):
        tokens = tuple(tokenize(text))
        if ends[-1] + len(tokens) + len(fact) > n_tokens:
            break
        filler.append(tokens)
        ends.append(ends[-1] + len(tokens))
    length = ends[-1] + len(fact)
    low, high = regions.bounds(region, length)
    places = [i for i, end in enumerate(ends) if low <= end and end + len(fact) <= high]
    if not places or not filler:
        raise UsageError(
            f"region {region}: no place for the fact of {len(fact)} tokens in [{low}, {high}) of {length} tokens; "
            "raise --tokens, or the sink or recent of the stream policy (lower them for the middle)"
        )
    place = Draws(seed, stream=3).pick(places)
    context = [t for part in (*filler[:place], fact, *filler[place:]) for t in part]
    return NeedlePrompt(
        seed=seed,
        region=region,
        context=tuple(context),
        question=tuple(tokenize(needle.question)),
        start=ends[place],
        stop=ends[place] + len(fact),
        needle=needle,
        answer_tokens=len(tokenize(f" {needle.answer}")) + 1,
    )
