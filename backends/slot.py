"""One slot of a pool: what it holds, what it is called, and the sole use of its session."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvtape.backends.errors import SessionFatal, StaleSlot
from kvtape.backends.protocol import Engine
from kvtape.backends.session import Session

__all__ = ["Lease", "Slot", "SlotHandle", "SlotState", "SlotStatus"]


class SlotState(StrEnum):
    """`changing` while a model or a session comes or goes."""

    EMPTY = "empty"
    LOADED = "loaded"
    IDLE = "idle"
    LEASED = "leased"
    CHANGING = "changing"


@dataclass(frozen=True, slots=True)
class SlotHandle:
    """A slot at one moment of its life."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """`idle_ns`: since the session was last given back, nanoseconds; None where no session waits.

    `fatal`: how the slot's last session failed; None when it did not.
    """

    handle: SlotHandle
    state: SlotState
    model: str | None
    idle_ns: int | None
    fatal: SessionFatal | None


@dataclass(slots=True)
class Slot:
    """What the pool knows of a slot; `used_ns` on the pool's clock, `reserved` while somebody works on it."""

    number: int
    generation: int = 0
    model: str | None = None
    engine: Engine | None = None
    session: Session | None = None
    used_ns: int = 0
    reserved: SlotState | None = None
    fatal: SessionFatal | None = None

    @property
    def handle(self) -> SlotHandle:
        return SlotHandle(self.number, self.generation)

    @property
    def state(self) -> SlotState:
        if self.reserved is not None:
            return self.reserved
        if self.session is not None:
            return SlotState.IDLE
        return SlotState.EMPTY if self.engine is None else SlotState.LOADED

    def cost_for(self, model: str) -> tuple[int, int, int]:
        """Sorts slots by what it takes to have a session on `model` here; then what holds it may still be of use."""
        if self.model == model:
            return (0, -self.used_ns, self.number) if self.session is not None else (1, 0, self.number)
        return (2, 0, self.number) if self.engine is None else (3, self.used_ns, self.number)


class Lease:
    """The sole use of a slot's session until the lease ends."""

    def __init__(self, handle: SlotHandle, session: Session) -> None:
        self.handle = handle
        self._session: Session | None = session

    @property
    def session(self) -> Session:
        """The session. Raises StaleSlot once the lease is over."""
        if self._session is None:
            raise StaleSlot(self.handle.slot, self.handle.generation, None)
        return self._session

    def end(self) -> None:
        """From now on the lease gives nothing."""
        self._session = None
