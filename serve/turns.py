"""One turn on one session, in slices, so that several take turns on one engine thread.

    waiting -> prefill, a chunk a slice -> decode, `SLICE_TOKENS` a slice -> End, or the error it failed with

Text is told as it comes; whoever listens may be on another thread. How it ended is told by whoever ran it, once the
session is free for the next turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence

from kvtape.backends.errors import Cancelled, ContextOverflow, EngineFault, KvtapeError, SessionFatal
from kvtape.backends.logits import log_softmax
from kvtape.backends.protocol import Logits
from kvtape.backends.session import Session
from kvtape.serve.requests import (
    End,
    EngineGone,
    GenerationRequest,
    Piece,
    ServiceError,
    TokenChoice,
    TooLong,
    Usage,
)
from kvtape.serve.sampling import Sampler, most_likely
from kvtape.serve.text_stream import StopStrings, TextStream
from kvtape.traces.errors import LogWriteFailed

__all__ = ["SLICE_TOKENS", "Told", "Turn"]

SLICE_TOKENS = 32
"""Tokens that a turn generates before another may; a decode run is recorded at the latest after as many."""

Told = Piece | End | ServiceError


class Turn:
    """`tell` takes what comes, one `End` or error last; `seed` is the request's, or drawn for it."""

    def __init__(self, request: GenerationRequest, seed: int, tell: Callable[[Told], None]) -> None:
        self.request = request
        self.tokens = [t for s in request.segments for t in s.tokens or ()]
        self._seed = seed
        self._tell = tell
        self._lock = threading.Lock()
        self._prefilling: Session | None = None
        self._cancelled = False
        self._why: ServiceError = EngineGone("the turn was cancelled")
        self.answer: tuple[str, tuple[int, ...], str] | None = None
        """Once it ended: see `answers.AnswerMemory.remember`."""

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self, why: ServiceError | None = None) -> None:
        """Stop at the next token, or in the middle of the prefill; from any thread, at any time. Told is `why`."""
        with self._lock:
            if why is not None and not self._cancelled:
                self._why = why
            self._cancelled = True
            if self._prefilling is not None:
                self._prefilling.cancel()

    def tell(self, what: Told) -> None:
        self._tell(what)

    def play(
        self, session: Session, spell: Callable[[Sequence[int]], str], ends: frozenset[int]
    ) -> Generator[None, None, End | ServiceError]:
        """Run on `session`, with a pause wherever another turn may run; returns how it ended. Raises LogWriteFailed."""
        try:
            return (yield from self._play(session, spell, ends))
        except Cancelled:
            return self._why
        except ContextOverflow as err:
            return TooLong(
                f"the prompt needs {err.needed} tokens, and the context of this server holds {err.available}"
            )
        except (SessionFatal, EngineFault):
            return EngineGone("the engine failed during this request; send it again")
        except LogWriteFailed:
            raise
        except KvtapeError as err:
            return EngineGone(f"the request could not be carried out ({type(err).__name__})")

    def _play(
        self, session: Session, spell: Callable[[Sequence[int]], str], ends: frozenset[int]
    ) -> Generator[None, None, End]:
        cached = yield from self._prefill(session)
        yield
        said = _Saying(self, spell, ends, self._seed)
        left = self.request.max_tokens
        reason = "n"
        while left and reason == "n" and not said.over:
            before = len(said.tokens)
            try:
                reason = session.decode(min(left, SLICE_TOKENS), choose=said.choose, stop_tokens=ends).stopped
            except ContextOverflow:
                if not said.tokens:
                    raise
                reason = "context_full"
            left -= len(said.tokens) - before
            yield
        if self._cancelled and not said.stopped:
            raise Cancelled("in the middle of the answer")
        said.finish()
        usage = Usage(len(self.tokens), cached, len(said.tokens))
        stopped = said.stopped or reason == "end_token"
        self.answer = said.spelled()
        return End("stop" if stopped else "length", usage, self._seed)

    def _prefill(self, session: Session) -> Generator[None, None, int]:
        """Returns how many tokens of the prompt were there already.

        A cancel that comes too late for it ends the session, since it would stop the next turn's first call instead.
        """
        with self._lock:
            if self._cancelled:
                raise Cancelled("before it began")
            self._prefilling = session
        try:
            status = yield from session.prefix_steps(self.request.segments)
        finally:
            with self._lock:
                self._prefilling = None
                late = self._cancelled
        if late:
            session.close("cancelled")
            raise Cancelled("after the prefill")
        return status.reused + status.forgotten


class _Saying:
    """The answer as it grows: choosing, spelling, stopping."""

    def __init__(self, turn: Turn, spell: Callable[[Sequence[int]], str], ends: frozenset[int], seed: int) -> None:
        self._turn = turn
        self._spell = spell
        self._ends = ends
        self._sampler = Sampler(turn.request.sampling, seed)
        self._stream = TextStream(spell)
        self._stops = StopStrings(turn.request.stop)
        self.tokens: list[int] = []
        self.text = ""

    @property
    def stopped(self) -> bool:
        return self._stops.hit

    @property
    def over(self) -> bool:
        return self._stops.hit or self._turn.cancelled

    def choose(self, logits: Logits) -> int | None:
        if self.over:
            return None
        token = self._sampler.choose(logits)
        if token not in self._ends:
            self.tokens.append(token)
            choices = () if self._turn.request.logprobs is None else (self._choice(token, logits),)
            self._send(self._stops.add(self._stream.add(token)), choices)
        return token

    def finish(self) -> None:
        """Send what waited for more that did not come."""
        rest = self._stops.add(self._stream.rest())
        self._send(rest if self._stops.hit else rest + self._stops.rest(), ())

    def spelled(self) -> tuple[str, tuple[int, ...], str] | None:
        """The text that was told, the tokens that spell its beginning, and the rest of it: a stop string may end it in
        the middle of a token, and a broken character could be that of other tokens, in another conversation."""
        spelled, known, too_many = 0, "", len(self.tokens) + 1
        n = len(self.tokens)
        while spelled < n:
            text = self._spell(self.tokens[:n])
            if self.text.startswith(text) and "\ufffd" not in text:
                spelled, known = n, text
            else:
                too_many = n
            n = (spelled + too_many) // 2
        return (self.text, tuple(self.tokens[:spelled]), self.text[len(known) :]) if spelled else None

    def _send(self, text: str, choices: tuple[TokenChoice, ...]) -> None:
        self.text += text
        if text or choices:
            self._turn.tell(Piece(text, choices))

    def _choice(self, token: int, logits: Logits) -> TokenChoice:
        wanted = self._turn.request.logprobs or 0
        logprobs = log_softmax(logits)
        best = most_likely(logprobs, wanted)[:wanted] if wanted else ()
        top = tuple((int(i), self._spell([int(i)]), float(logprobs[i])) for i in best)
        return TokenChoice(token, self._spell([token]), float(logprobs[token]), top)
