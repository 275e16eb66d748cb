"""The slots of a pool as a server sees them: whose conversation stands where, and a session for the next turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvtape.backends.session import Session
from kvtape.backends.slot import SlotHandle, SlotState
from kvtape.backends.slots import SlotPool
from kvtape.serve.conversations import Choice, Seat, choose_seat

__all__ = ["Seats"]


@dataclass(slots=True)
class _Guest:
    """Who sits on a slot."""

    session: Session | None = None
    name: str | None = None
    asked: int = 0
    last_used: int = 0
    busy: bool = False


class Seats:
    """Used by one thread; `resident_tokens` may be asked from any.

    `may_branch`: see `conversations.choose_seat`.
    """

    def __init__(self, pool: SlotPool, model: str, *, may_branch: bool) -> None:
        self._pool = pool
        self._model = model
        self._may_branch = may_branch
        self._guests = [_Guest() for _ in pool.status()]
        self._turns = 0

    def find(self, tokens: list[int], name: str | None) -> Choice | None:
        """Where a prompt goes now; None: it waits."""
        return choose_seat([self._seat(i) for i in range(len(self._guests))], tokens, name, may_branch=self._may_branch)

    @contextmanager
    def taken(self, choice: Choice, tokens: list[int], name: str | None) -> Iterator[Session]:
        """The session of the slot, for one turn. Raises what loading and opening raise."""
        guest = self._guests[choice.slot]
        guest.busy = True
        try:
            if choice.fresh:
                self._leave(choice.slot)
            self._open(choice.slot)
            guest.name = name
            with self._pool.lease(self._handle(choice.slot)) as lease:
                guest.session = lease.session
                yield lease.session
                guest.asked = len(tokens)
        finally:
            self._turns += 1
            guest.last_used = self._turns
            guest.busy = False
            self._look(choice.slot)

    def reap(self) -> None:
        """Close sessions that have waited too long."""
        for handle in self._pool.reap():
            self._guests[handle.slot] = _Guest()

    def resident_tokens(self) -> int:
        """Over all sessions."""
        sessions = [g.session for g in self._guests]
        return sum(s.resident.n_tokens for s in sessions if s is not None and not s.ended)

    # -- steps ----------------------------------------------------------------------------------------------------

    def _seat(self, slot: int) -> Seat:
        guest = self._guests[slot]
        if guest.session is None or guest.busy:
            return Seat(slot, guest.busy, name=guest.name)
        session = guest.session
        return Seat(slot, False, session.tape, guest.asked, session.resident, guest.last_used, guest.name)

    def _leave(self, slot: int) -> None:
        guest = self._guests[slot]
        if guest.session is not None:
            with self._pool.lease(self._handle(slot)) as lease:
                lease.session.close("displaced")
        guest.session, guest.name, guest.asked = None, None, 0

    def _open(self, slot: int) -> None:
        if self._state(slot) is SlotState.EMPTY:
            self._pool.load(self._handle(slot), self._model)
        if self._state(slot) is SlotState.LOADED:
            self._pool.open(self._handle(slot))

    def _look(self, slot: int) -> None:
        """A session that ended has left its slot."""
        guest = self._guests[slot]
        if guest.session is not None and guest.session.ended:
            guest.session, guest.name, guest.asked = None, None, 0

    def _handle(self, slot: int) -> SlotHandle:
        return self._pool.status()[slot].handle

    def _state(self, slot: int) -> SlotState:
        return self._pool.status()[slot].state
