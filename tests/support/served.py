"""A service on a tiny model, and conversations with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from kvtape.backends.clock import ManualClock
from kvtape.backends.protocol import EventSink, SessionConfig
from kvtape.backends.registry import open_engine
from kvtape.planner.specs import parse_policy
from kvtape.serve.engines import SharedEngine
from kvtape.serve.local import Limits, LocalService
from kvtape.serve.opening import Serving, local_service
from kvtape.serve.requests import End, GenerationRequest, Piece, Sampling
from kvtape.testing.sink import ListSink
from support.llama_tiny import model_file

__all__ = ["GREEDY", "Answer", "answer", "ask", "run", "talk", "tiny_service"]

GREEDY = Sampling(temperature=0.0)
T = TypeVar("T")
Answer = tuple[str, End]


@contextmanager
def tiny_service(
    backend: str = "llama",
    *,
    slots: int = 1,
    policy: str = "none",
    n_ctx: int = 512,
    sink: EventSink | None = None,
    limits: Limits | None = None,
    template: str | None = None,
    content: bool = True,
    weights: str = "f16",
    **config: Any,
) -> Iterator[LocalService]:
    """A service on the tiny llama model; sessions end with the block, as does the service."""
    path = model_file("llama", weights=weights)
    engine = SharedEngine(lambda: open_engine(backend, path), outlives=False)
    asked = SessionConfig(n_ctx=n_ctx, chunk=64, **config)
    serving = Serving(
        model=str(path),
        model_name="tiny",
        config=asked,
        policy=parse_policy(policy),
        slots=slots,
        content=content,
        limits=limits,
        template=template,
    )
    try:
        with local_service(engine, sink or ListSink(), ManualClock(), serving, "run") as service:
            try:
                yield service
            finally:
                asyncio.run(service.close())
    finally:
        engine.close()


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return asyncio.run(work())


async def answer(service: LocalService, request: GenerationRequest) -> Answer:
    """All the text, and how it ended."""
    text = ""
    async for item in service.generate(request):
        if isinstance(item, End):
            return text, item
        assert isinstance(item, Piece)
        text += item.text
    raise AssertionError("a turn ends with an End")


async def ask(service: LocalService, messages: Sequence[dict[str, str]], n: int = 12, **more: Any) -> Answer:
    """The greedy answer to a chat."""
    request = GenerationRequest(await service.chat_prompt(messages), n, GREEDY)
    return await answer(service, replace(request, **more))


async def talk(service: LocalService, topics: Sequence[str], n: int = 12, **more: Any) -> list[Answer]:
    """A chat with a turn for each topic; each answer goes into the next prompt."""
    messages: list[dict[str, str]] = []
    answers = []
    for topic in topics:
        messages.append({"role": "user", "content": topic})
        answers.append(await ask(service, messages, n, **more))
        messages.append({"role": "assistant", "content": answers[-1][0]})
    return answers
