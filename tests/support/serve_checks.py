"""What is held against a load when it is over: the log, each conversation alone, the server's memory."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvtape.backends.clock import MonotonicClock
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.registry import open_engine
from kvtape.planner.blocks import PromptSegment
from kvtape.planner.specs import parse_policy
from kvtape.serve.engines import SharedEngine
from kvtape.serve.local import LocalService
from kvtape.serve.opening import Serving, local_service
from kvtape.serve.requests import End, GenerationRequest, Piece, Sampling, TokenChoice
from kvtape.serve.text_stream import TextStream
from kvtape.testing.sink import ListSink
from kvtape.traces.reader import open_log
from kvtape.traces.verify import verify
from support.serve_load import Told

__all__ = [
    "Alone",
    "LoggedTurn",
    "findings",
    "is_near_tie",
    "logged_turns",
    "memory",
    "missing",
    "percentiles",
]

_ROWS = """
SELECT k.run_id, k.session_id, k.start, k.tokens, e.op = 'decode', e.turn,
    (SELECT reused + forgotten FROM turns t WHERE (t.run_id, t.session_id, t.turn) = (e.run_id, e.session_id, e.turn))
FROM tokens k JOIN events e ON (k.run_id, k.session_id, k.seq) = (e.run_id, e.session_id, e.seq)
ORDER BY k.run_id, k.session_id, k.seq
"""

Key = tuple[int, int, int, str]
"""Prompt tokens, cached tokens, generated tokens, text."""


@dataclass(slots=True)
class LoggedTurn:
    """A turn of a log with content: the tokens of its prompt, and those that were generated."""

    prompt: tuple[int, ...]
    cached: int
    generated: list[int] = field(default_factory=list)


def logged_turns(log: Path, spell: Callable[[Sequence[int]], str], ends: frozenset[int]) -> dict[Key, list[LoggedTurn]]:
    """Every turn that generated something, by what a client is told of it."""
    with open_log(log) as reader:
        _, rows = reader.sql(_ROWS)
    tapes: dict[tuple[str, str], list[int]] = {}
    turns: dict[tuple[str, str, int], LoggedTurn] = {}
    for run, session, start, tokens, decoded, turn, cached in rows:
        tape = tapes.setdefault((run, session), [])
        del tape[start:]
        if decoded:
            this = turns.setdefault((run, session, turn), LoggedTurn(tuple(tape), int(cached)))
            this.generated += [t for t in tokens if t not in ends]
        tape += tokens
    found: dict[Key, list[LoggedTurn]] = {}
    for one in turns.values():
        stream = TextStream(spell)
        text = "".join(map(stream.add, one.generated)) + stream.rest()
        found.setdefault((len(one.prompt), one.cached, len(one.generated), text), []).append(one)
    return found


def key_of(told: Told) -> Key:
    return told.prompt_tokens, told.cached_tokens, told.completion_tokens, told.text


def missing(told: Sequence[Told], logged: Mapping[Key, Sequence[LoggedTurn]]) -> list[str]:
    """Answers that a client had and that are not turns of the log; each turn stands for one answer."""
    left = Counter({key: len(turns) for key, turns in logged.items()})
    lost = []
    for one in told:
        if left[key_of(one)] <= 0:
            lost.append(f"{one.conversation} turn {one.turn}")
        left[key_of(one)] -= 1
    return lost


def findings(log: Path) -> list[str]:
    """What `kvtape verify` has against a log."""
    return [str(f) for f in verify(log).findings]


@dataclass(slots=True)
class Alone:
    """Each conversation by itself on a service of its own, with the messages that it had under load.

    A server that was started anew does not remember as which tokens it gave an answer: where an answer differs, the
    prompt of the log must spell what this conversation's messages spell, and is answered alone.
    """

    model: Path
    backend: str
    config: SessionConfig
    max_tokens: int
    logged: Mapping[Key, Sequence[LoggedTurn]]
    equal: int = 0
    near_ties: int = 0
    different: list[str] = field(default_factory=list)

    def compare(self, told: Sequence[Told], tie: float) -> None:
        """`tie`: nats by which another token may have been likelier, where an answer departs from the one alone."""
        engine = SharedEngine(lambda: open_engine(self.backend, self.model), outlives=True)
        talks: dict[str, list[Told]] = {}
        for one in told:
            talks.setdefault(one.conversation, []).append(one)
        try:
            for turns in talks.values():
                self._with_service(engine, partial(self._talk, engine, turns, tie))
        finally:
            engine.close()

    def _with_service(self, engine: SharedEngine, work: Callable[[LocalService], Coroutine[Any, Any, None]]) -> None:
        serving = Serving(str(self.model), "alone", self.config, parse_policy("none"))
        with local_service(engine, ListSink(), MonotonicClock(), serving, "alone") as service:
            try:
                asyncio.run(work(service))
            finally:
                asyncio.run(service.close())

    async def _talk(self, engine: SharedEngine, turns: Sequence[Told], tie: float, service: LocalService) -> None:
        for turn in turns:
            prompt = await service.chat_prompt(turn.messages)
            text, _ = await self._said(service, prompt)
            if text == turn.text:
                self.equal += 1
                continue
            spelled = engine.detokenize([t for s in prompt for t in s.tokens or ()])
            served = [t.prompt for t in self.logged.get(key_of(turn), ()) if engine.detokenize(t.prompt) == spelled]
            same = [await self._same(service, p, turn.text, tie) for p in served]
            if "equal" in same:
                self.equal += 1
            elif "near tie" in same:
                self.near_ties += 1
            else:
                why = f"alone {text[:60]!r}" if served else "and its prompt was another's"
                self.different.append(f"{turn.conversation} turn {turn.turn}: {turn.text[:60]!r}, {why}")

    async def _same(self, service: LocalService, tokens: Sequence[int], text: str, tie: float) -> str:
        said, choices = await self._said(service, service.token_prompt(tokens), logprobs=4)
        return "equal" if said == text else "near tie" if is_near_tie(choices, text, tie) else "different"

    async def _said(
        self, service: LocalService, prompt: tuple[PromptSegment, ...], logprobs: int | None = None
    ) -> tuple[str, list[TokenChoice]]:
        text, choices = "", []
        request = GenerationRequest(prompt, self.max_tokens, Sampling(temperature=0.0), logprobs=logprobs)
        async for item in service.generate(request):
            if isinstance(item, End):
                break
            assert isinstance(item, Piece)
            text += item.text
            choices += item.choices
        return text, choices


def is_near_tie(choices: Sequence[TokenChoice], text: str, tie: float) -> bool:
    """Whether `text` follows the choices to where one of the runners-up, at most `tie` nats less likely, goes on."""
    at = ""
    for choice in choices:
        if not text.startswith(at + choice.text):
            rest = text[len(at) :]
            return any(choice.logprob - p <= tie and t and rest.startswith(t) for _, t, p in choice.top[1:])
        at += choice.text
    return False


def memory(starts: Sequence[Sequence[tuple[int, int]]]) -> dict[str, float]:
    """Of the longest life of a server: MiB in the middle of it and at its end, and KiB a turn between, by least
    squares, over so many turns; the peak is of all."""
    mib = 1 << 20
    longest = max((s for s in starts if s), key=lambda s: s[-1][0] - s[0][0])
    middle = (longest[0][0] + longest[-1][0]) / 2
    tail = [(float(t), b / mib) for t, b in longest if t >= middle]
    turns, sizes = [t for t, _ in tail], [size for _, size in tail]
    slope = statistics.linear_regression(turns, sizes).slope if len(set(turns)) > 1 else math.nan
    return {
        "rss_mib_middle": round(sizes[0], 1),
        "rss_mib_end": round(sizes[-1], 1),
        "rss_mib_peak": round(max(b for s in starts for _, b in s) / mib, 1),
        "rss_kib_per_turn": round(slope * 1024, 1),
        "turns_of_tail": turns[-1] - turns[0],
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile, seconds; nearest rank."""
    there = sorted(v for v in values if not math.isnan(v))
    return {f"p{q}": round(there[min(len(there) - 1, math.ceil(q / 100 * len(there)) - 1)], 4) for q in (50, 95)}
