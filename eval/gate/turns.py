"""A/B turns: the same conversations through a plain and an optimised session, turn by turn, in balanced order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvtape.backends.session import Session
from kvtape.backends.transcript import Transcript
from kvtape.eval.gate.arms import Arms, Meter
from kvtape.eval.gate.order import plain_first
from kvtape.eval.gate.workloads import Conversation, Workload

__all__ = ["Side", "Talk", "Tokenize", "Turn", "run_turns", "talks"]

Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Side:
    """One arm's turn: nanoseconds from the call of `ensure_prefix` to the return of `decode`, and what was said."""

    wall_ns: int
    cpu_ns: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn in both arms. `used`: how often the optimisation came into play in it."""

    conversation: int
    number: int
    plain_first: bool
    plain: Side
    optimised: Side
    used: int

    @property
    def parted(self) -> bool:
        return self.plain.tokens != self.optimised.tokens


class Talk:
    """A conversation in one session, turn by turn, as `kvtape record --chat` does it or, as suffix, as agents do."""

    def __init__(self, session: Session, workload: Workload, conversation: Conversation, tokenize: Tokenize) -> None:
        self.session = session
        self._workload = workload
        self._transcript = Transcript(tokenize)
        self._transcript.say(self._transcript.message("system", conversation.system))
        self._messages = [self._transcript.message("user", text) for text in conversation.messages]

    def prompt(self, number: int) -> None:
        """The part of turn `number` before its answer."""
        message, script = self._messages[number], self._transcript
        if not self._workload.as_suffix:
            script.say(message)
            self.session.ensure_prefix(script.offer())
            return
        self.session.ensure_prefix(script.said(), need_logits=False)
        script.say(message)
        self.session.prefill_suffix([*(message.tokens or ()), *(script.cue.tokens or ())])

    def turn(self, number: int) -> tuple[int, ...]:
        """Turn `number`, greedy; what was answered."""
        self.prompt(number)
        return self.session.decode(self._workload.answer).tokens

    def answered(self, tokens: Sequence[int]) -> None:
        self._transcript.answered(tokens)


@contextmanager
def talks(
    workload: Workload, number: int, seed: int, arms: Arms, tokenize: Tokenize, prefix: str = ""
) -> Iterator[tuple[Talk, Talk]]:
    """Conversation `number` in a plain and an optimised session, both open meanwhile."""
    conversation = workload.draw(number, seed)
    with (
        arms.open("plain", f"{prefix}{number}-plain") as plain,
        arms.open("optimised", f"{prefix}{number}-optimised") as optimised,
    ):
        yield (
            Talk(plain, workload, conversation, tokenize),
            Talk(optimised, workload, conversation, tokenize),
        )


def run_turns(
    workload: Workload,
    conversations: int,
    arms: Arms,
    meter: Meter,
    tokenize: Tokenize,
    *,
    seed: int = 0,
    settle: Callable[[], object] = lambda: None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[Turn]:
    """`conversations` conversations of `workload`; each arm goes on from its own answers.

    Each conversation has two sessions of its own, open at the same time. `settle` runs before each timed turn, untimed.
    """
    turns: list[Turn] = []
    order = plain_first(seed)
    for number in range(conversations):
        turns += _converse(number, workload, arms, meter, tokenize, seed, order, settle)
        progress(len(turns), conversations * workload.turns)
    return turns


def _converse(
    number: int,
    workload: Workload,
    arms: Arms,
    meter: Meter,
    tokenize: Tokenize,
    seed: int,
    order: Iterator[bool],
    settle: Callable[[], object],
) -> Iterator[Turn]:
    with talks(workload, number, seed, arms, tokenize) as (plain, optimised):
        used = 0
        for at in range(workload.turns):
            first = next(order)
            sides = {}
            for talk in (plain, optimised) if first else (optimised, plain):
                settle()
                sides[talk is optimised] = _timed(talk, at, meter)
            before, used = used, arms.used(optimised.session)
            yield Turn(number, at, first, sides[False], sides[True], used - before)


def _timed(talk: Talk, number: int, meter: Meter) -> Side:
    wall, cpu = meter.wall.now_ns(), meter.cpu.now_ns()
    tokens = talk.turn(number)
    cpu, wall = meter.cpu.now_ns() - cpu, meter.wall.now_ns() - wall
    talk.answered(tokens)
    return Side(wall, cpu, tokens)
