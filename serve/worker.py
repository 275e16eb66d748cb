"""The one thread that touches an engine: turns wait in line, run on slots, and share the thread slice by slice."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from kvtape.backends.errors import KvtapeError
from kvtape.serve.answers import AnswerMemory
from kvtape.serve.conversations import Choice
from kvtape.serve.defects import place_of
from kvtape.serve.requests import EngineGone, ShuttingDown
from kvtape.serve.seats import Seats
from kvtape.serve.turns import Told, Turn
from kvtape.traces.errors import LogWriteFailed

__all__ = ["Worker"]

_REAP_EVERY_S = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Running:
    turn: Turn
    steps: Generator[None, None, Told]


class Worker:
    """`spell` is the engine's detokenizer, `ends` the tokens that end a turn.

    Turns begin in the order in which they came; one that waits for its own conversation lets others pass.
    """

    def __init__(
        self, seats: Seats, spell: Callable[[Sequence[int]], str], ends: frozenset[int], answers: AnswerMemory
    ) -> None:
        self._seats = seats
        self._spell = spell
        self._ends = ends
        self._answers = answers
        self._changed = threading.Condition()
        self._waiting: deque[Turn] = deque()
        self._running: list[_Running] = []
        self._closing = False
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="kvtape-engine", daemon=True)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def broken(self) -> Exception | None:
        """Why nothing is recorded, and so nothing served, any more."""
        return self._broken

    def start(self) -> None:
        self._thread.start()

    def submit(self, turn: Turn) -> None:
        """Put a turn at the end of the line. Raises ShuttingDown."""
        with self._changed:
            if self._closing or self._broken is not None:
                raise ShuttingDown("the server takes no more requests")
            self._waiting.append(turn)
            self._changed.notify()

    def close(self) -> None:
        """Take no more, refuse what waits; what runs goes on. See `join`."""
        with self._changed:
            self._closing = True
            refused, self._waiting = list(self._waiting), deque()
            self._changed.notify()
        for turn in refused:
            turn.tell(ShuttingDown("the server is shutting down"))

    def cancel_running(self) -> None:
        """Every turn that runs ends at its next token."""
        for one in list(self._running):
            one.turn.cancel(ShuttingDown("the server is shutting down"))

    def leave(self, turn: Turn) -> bool:
        """Take a turn out of the line; whether it was still there."""
        with self._changed:
            if turn not in self._waiting:
                return False
            self._waiting.remove(turn)
            return True

    def fail(self, err: Exception) -> ShuttingDown:
        """What cannot be recorded is not served: take no more, and refuse what waits. What to tell."""
        self._broken = err
        self.close()
        return ShuttingDown("the log cannot be written, and nothing is served that is not recorded")

    def join(self, timeout_s: float) -> bool:
        """Wait for the last turn to end; whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._wait():
                ran_before = list(self._running)
                for turn, choice in self._startable():
                    # In front: between its prompt and its first token each of the others has one step.
                    self._running.insert(0, _Running(turn, self._served(turn, choice)))
                    self._step(self._running[0])
                for one in ran_before:
                    self._step(one)
        except LogWriteFailed as err:
            self._give_up(err)
        except Exception as err:
            _tell_defect("the line of requests", err)
            self._give_up(EngineGone("a defect stopped the line of requests"))

    def _give_up(self, err: Exception) -> None:
        """The thread ends; nobody may wait for it."""
        told = self.fail(err)
        for one in self._running:
            one.turn.tell(told)
        self._running.clear()

    def _step(self, one: _Running) -> None:
        try:
            next(one.steps)
        except StopIteration as ended:
            # Whoever hears the end may come with the next prompt at once: it must find all as it is now.
            self._running.remove(one)
            if one.turn.answer is not None:
                self._answers.remember(*one.turn.answer)
            one.turn.tell(ended.value)

    def _wait(self) -> bool:
        """Until there is something to do; False when nothing ever will be."""
        with self._changed:
            while not self._running and not self._waiting:
                if self._closing:
                    return False
                if not self._changed.wait(_REAP_EVERY_S):
                    self._seats.reap()
            return True

    def _startable(self) -> Iterator[tuple[Turn, Choice]]:
        """The turns that can begin now, each with its slot; the slot must be taken before the next is asked for."""
        with self._changed:
            line = list(self._waiting)
        named: set[str] = set()
        for turn in line:
            name = turn.request.session
            if turn.cancelled:
                self.leave(turn)
                continue
            choice = None if name in named else self._seats.find(turn.tokens, name)
            if choice is None:
                if name is not None:
                    named.add(name)
                continue
            if self.leave(turn):
                yield turn, choice

    def _served(self, turn: Turn, choice: Choice) -> Generator[None, None, Told]:
        """A turn with its session, from begin to end; returns how it ended. The first step takes the slot."""
        try:
            with self._seats.taken(choice, turn.tokens, turn.request.session) as session:
                told: Told = yield from turn.play(session, self._spell, self._ends)
        except LogWriteFailed as err:
            told = self.fail(err)
        except KvtapeError as err:
            told = EngineGone(f"no session could be opened for this request ({type(err).__name__})")
        except Exception as err:
            _tell_defect("a turn", err)
            told = EngineGone("this request failed inside the server")
        return told


def _tell_defect(what: str, err: Exception) -> None:
    """Its kind and place; its text may hold a part of a prompt."""
    _log.error("%s failed in a way that it should not: %s at %s", what, type(err).__name__, place_of(err))
