"""What a long prompt costs the others: engine calls between, counted in the log, whose order is that of one thread."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from kvtape.backends.sinks import WatchingSink
from kvtape.planner.events import Event, Op
from kvtape.serve.local import LocalService
from kvtape.serve.requests import GenerationRequest
from kvtape.testing.sink import ListSink
from support.served import GREEDY, Answer, answer, run, tiny_service

LONG = [3 + i * i % 90 for i in range(2000)]
SHORT = [5 + i for i in range(20)]
PIECES = len(LONG) // 64
"""Calls of the engine that the long prompt takes, but for the last: `tiny_service` has chunks of 64."""


class _AtPiece(WatchingSink):
    """Holds the engine's thread at a piece of the first long prompt until somebody has done what is due there."""

    def __init__(self, piece: int) -> None:
        self.then = self.kept = ListSink()
        self._left = piece
        self.reached, self.done = threading.Event(), threading.Event()

    def see(self, event: Event) -> None:
        if event.op is Op.PREFILL and event.n_tokens == 64:
            self._left -= 1
            if not self._left:
                self.reached.set()
                assert self.done.wait(60)


async def _both(service: LocalService, sink: _AtPiece) -> tuple[Answer, Answer]:
    """The long prompt, and a short one that comes at that piece of it."""
    long = asyncio.create_task(answer(service, GenerationRequest(service.token_prompt(LONG), 4, GREEDY)))
    await asyncio.to_thread(sink.reached.wait, 60)
    short = asyncio.create_task(answer(service, GenerationRequest(service.token_prompt(SHORT), 80, GREEDY)))
    await asyncio.sleep(0)
    assert service.status().waiting == 1
    sink.done.set()
    return await long, await short


async def _one_by_one(service: LocalService) -> list[Answer]:
    return [
        await answer(service, GenerationRequest(service.token_prompt(tokens), n, GREEDY))
        for tokens, n in ((LONG, 4), (SHORT, 80))
    ]


def _what_happened(events: list[Event]) -> list[list[Event]]:
    """The events of each session by itself, without times and names."""
    sessions: dict[str, list[Event]] = {}
    for event in events:
        bare = replace(event, session_id="", at_ns=0, elapsed_ns=None)
        sessions.setdefault(event.session_id, []).append(bare)
    return [events for events in sessions.values() if any(e.op is Op.PROMPT for e in events)]


@pytest.mark.parametrize("backend", ["llama", "openvino"])
@pytest.mark.parametrize("policy", ["none", "stream:sink=4,recent=300"])
def test_a_short_turn_waits_for_one_piece_of_a_long_prompt(backend: str, policy: str) -> None:
    sink, alone = _AtPiece(piece=3), ListSink()
    with tiny_service(backend, slots=2, n_ctx=2560, policy=policy, sink=sink) as service:
        mixed = run(lambda: _both(service, sink))
    with tiny_service(backend, slots=2, n_ctx=2560, policy=policy, sink=alone) as service:
        apart = run(lambda: _one_by_one(service))
    events = sink.kept.events
    short = next(e.session_id for e in events if e.op is Op.PROMPT and e.n_tokens == len(SHORT))
    prefills, decodes = ([e for e in events if e.op is op] for op in (Op.PREFILL, Op.DECODE))
    calls = [e for e in events if e.op in (Op.PREFILL, Op.DECODE)]
    arrival = calls.index(prefills[2])
    first, *later = (calls.index(e) for e in decodes if e.session_id == short)
    # Of the long prompt one piece between the short prompt and its first token, and one between its runs of tokens.
    assert [e.session_id == short for e in calls[arrival + 1 : first + 1]] == [True, False, True]
    assert [b - a for a, b in zip([first, *later], later, strict=False)] == [2] * len(later)
    assert sum(e.session_id != short for e in prefills) == PIECES + 1
    assert [text for text, _ in mixed] == [text for text, _ in apart]
    assert _what_happened(events) == _what_happened(alone.events)
