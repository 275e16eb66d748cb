"""A `Service` over an engine of this process (or of a host of its own): a line of turns, one thread, many listeners."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtape.planner.blocks import PromptSegment
from kvtape.serve.answers import AnswerMemory
from kvtape.serve.counting import CountingSink
from kvtape.serve.engines import SharedEngine
from kvtape.serve.prompts import PromptMaker
from kvtape.serve.requests import (
    Deadline,
    End,
    GenerationRequest,
    Overloaded,
    Piece,
    ServiceError,
    ServiceStatus,
    ShuttingDown,
)
from kvtape.serve.seats import Seats
from kvtape.serve.templates import ChatTemplate
from kvtape.serve.turns import Told, Turn
from kvtape.serve.vocabulary import Vocabulary
from kvtape.serve.worker import Worker
from kvtape.traces.errors import LogWriteFailed

__all__ = ["Limits", "LocalService"]


@dataclass(frozen=True, slots=True)
class Limits:
    """`queue`: turns that may wait. `turn_s`: how long one may take, waiting included. `grace_s`: at the end."""

    queue: int = 64
    turn_s: float = 600.0
    grace_s: float = 10.0


class LocalService:
    """See `requests.Service`.

    Args:
        seats: of a pool over `engine`.
        flush: returns when everything recorded so far is durable; an `End` is told after it.
        template: a chat template instead of the model's.
    """

    def __init__(
        self,
        engine: SharedEngine,
        seats: Seats,
        vocabulary: Vocabulary,
        counted: CountingSink,
        *,
        model_name: str,
        n_ctx: int,
        slots: int,
        flush: Callable[[], int],
        limits: Limits | None = None,
        template: str | None = None,
    ) -> None:
        self.model_name = model_name
        self.n_ctx = n_ctx
        self._engine = engine
        self._slots = slots
        self._seats = seats
        self._counted = counted
        self._flush = flush
        self._limits = limits or Limits()
        answers = AnswerMemory()
        source = vocabulary.template if template is None else template
        self._prompts = PromptMaker(
            engine.tokenize,
            vocabulary,
            answers,
            template=None if source is None else ChatTemplate(source, bos=vocabulary.bos, eos=vocabulary.eos),
            n_vocab=engine.facts.n_vocab,
        )
        self._worker = Worker(seats, engine.detokenize, engine.facts.end_tokens, answers)
        self._worker.start()
        self._closed = False

    async def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[PromptSegment, ...]:
        """Rendered and tokenised on another thread."""
        return await asyncio.to_thread(self._prompts.chat, messages, tools)

    async def text_prompt(self, text: str) -> tuple[PromptSegment, ...]:
        """Tokenised on another thread."""
        return await asyncio.to_thread(self._prompts.text, text)

    def token_prompt(self, tokens: Sequence[int]) -> tuple[PromptSegment, ...]:
        return self._prompts.tokens(tokens)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Piece | End]:
        """See `requests.Service`; a turn whose listener is gone is cancelled."""
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[Told] = asyncio.Queue()

        def tell(item: Told) -> None:
            # The loop may have ended before the thread has.
            if not loop.is_closed():
                loop.call_soon_threadsafe(told.put_nowait, item)

        def late() -> None:
            err = Deadline(f"the request took longer than {self._limits.turn_s:g} s")
            turn.cancel(err)
            told.put_nowait(err)

        seed = request.sampling.seed
        turn = Turn(request, secrets.randbits(63) if seed is None else seed, tell)
        self._submit(turn)
        # A timer, not `asyncio.timeout`: whoever listens may do so from several tasks, or not listen for a while.
        deadline = loop.call_later(self._limits.turn_s, late)
        try:
            while True:
                item = await told.get()
                if isinstance(item, ServiceError):
                    raise item
                if isinstance(item, End):
                    await self._recorded()
                    yield item
                    return
                yield item
        finally:
            deadline.cancel()
            turn.cancel()
            self._worker.leave(turn)

    def status(self) -> ServiceStatus:
        return ServiceStatus(
            ready=not self._closed and self._worker.broken is None,
            running=self._worker.running,
            waiting=self._worker.waiting,
            slots=self._slots,
            resident_tokens=self._seats.resident_tokens(),
            capacity_tokens=self._slots * self.n_ctx,
            counters=self._counted.counts(),
        )

    @property
    def broken(self) -> str | None:
        """Why nothing can be recorded any more."""
        return None if self._worker.broken is None else str(self._worker.broken)

    async def close(self) -> None:
        """The sessions are the pool's to close, when this has returned."""
        self._closed = True
        self._worker.close()
        for more in (self.hurry, self._engine.abandon):
            if await asyncio.to_thread(self._worker.join, self._limits.grace_s):
                return
            more()
        await asyncio.to_thread(self._worker.join, self._limits.grace_s)

    def hurry(self) -> None:
        """What runs ends at its next token; for the end, and for one who does not want to wait for it."""
        self._worker.cancel_running()

    async def _recorded(self) -> None:
        """Wait until all that happened is durable. Raises ShuttingDown where it cannot be."""
        try:
            await asyncio.to_thread(self._flush)
        except LogWriteFailed as err:
            raise self._worker.fail(err) from None

    def _submit(self, turn: Turn) -> None:
        if self._worker.waiting >= self._limits.queue:
            raise Overloaded(f"{self._worker.waiting} requests wait already; try again", retry_after_s=1)
        if self._closed:
            raise ShuttingDown("the server is shutting down")
        self._worker.submit(turn)
