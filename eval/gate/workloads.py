"""What the gate talks about: conversations drawn from a seed, of a few kinds, or the user's own chat."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtape.backends.errors import UsageError
from kvtape.eval.filler import Draws, sentences
from kvtape.planner.grammar import nearest

__all__ = ["WORKLOADS", "Conversation", "Workload", "own_chat", "workload_named"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is said before, and each turn's message of the user."""

    system: str
    messages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of conversation. `says` describes it; `draw(number, seed)` makes one of `turns` turns.

    `answer`: tokens asked for in each turn. `as_suffix`: the message is prefilled by a call of its own behind the
    prefix (`prefill_suffix`), as agents do; else the whole transcript is offered at once, as `record --chat` does.
    """

    name: str
    says: str
    turns: int
    answer: int
    as_suffix: bool
    draw: Callable[[int, int], Conversation]


_ASKED = (
    "What should I know about {}?", "Tell me in two sentences why {} matters.", "How would you explain {} to a child?",
    "Give me one example of {}.", "What is the most common mistake with {}?", "And what has changed about {} lately?",
)  # fmt: skip
_TOPICS = (
    "making bread at home", "keeping bees", "the tides", "writing a letter of complaint", "repairing a bicycle",
    "reading a map", "growing beans on a balcony", "the history of clocks", "learning to swim", "cold frames",
    "packing for a long walk", "how bridges are built", "choosing a first telescope", "saving energy in winter",
)  # fmt: skip


def _chat(number: int, seed: int) -> Conversation:
    draws = Draws(seed, stream=100 + number)
    topic = draws.pick(_TOPICS)
    return Conversation(
        "You are a helpful assistant. Answer clearly, and say so where you are not sure.",
        tuple(draws.pick(_ASKED).format(topic) for _ in range(4)),
    )


def _steps(number: int, seed: int) -> Conversation:
    told = sentences(seed * 1009 + number)
    return Conversation(
        "You watch a village. After each report you name, in a few words, who was seen last. Nothing else.",
        tuple("".join(next(told) for _ in range(2)).strip() for _ in range(6)),
    )


def _rewrite(number: int, seed: int) -> Conversation:
    told = sentences(seed * 2003 + number)
    text = "".join(next(told) for _ in range(4)).strip()
    again = ("Repeat this text word for word: {}", "Now the same text once more, word for word: {}")
    return Conversation("You copy texts exactly.", tuple(a.format(text) for a in again))


WORKLOADS: Mapping[str, Workload] = {
    w.name: w
    for w in (
        Workload("chat", "short questions about one topic, answers of 32 tokens", 4, 32, False, _chat),
        Workload("steps", "an agent's steps: a report as suffix, answers of 6 tokens", 6, 6, True, _steps),
        Workload("rewrite", "a paragraph to be repeated, answers of 48 tokens", 2, 48, False, _rewrite),
    )
}
"""By name. `chat` is what `kvtape record --chat` does."""


def workload_named(name: str) -> Workload:
    """Raises UsageError for a name that is none."""
    if name not in WORKLOADS:
        raise UsageError(f"unknown workload {name!r}{nearest(name, WORKLOADS)} choose one of {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def own_chat(messages: Sequence[tuple[str, str]], answer: int) -> Workload:
    """The user's own chat, `(role, content)` each, repeated as every conversation; its name has a digest of it.

    Answers in it are left out: both arms answer by themselves. Raises UsageError when no user says anything.
    """
    asked = tuple(content for role, content in messages if role == "user")
    if not asked:
        raise UsageError("the chat has no user message")
    system = "\n".join(content for role, content in messages if role == "system")
    text = json.dumps([system, asked, answer])
    name = f"chat-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    said = f"a chat of {len(asked)} turns, answers of {answer} tokens"
    return Workload(name, said, len(asked), answer, False, lambda number, seed: Conversation(system, asked))
