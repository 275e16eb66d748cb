"""What stands around every operation of a session: refusals, fatals, taking back, and the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Self

from kvtape.backends import deferred, surgery
from kvtape.backends.catalog import CatalogState
from kvtape.backends.errors import (
    Cancelled,
    ChoiceFailed,
    ContextOverflow,
    EngineFault,
    FatalClass,
    SessionClosed,
    SessionFatal,
    UsageError,
)
from kvtape.backends.exclusive import Exclusive
from kvtape.backends.parts import Parts
from kvtape.backends.protocol import AttentionMass
from kvtape.backends.shadow import Shadow
from kvtape.planner.blocks import BlockError
from kvtape.planner.events import Op
from kvtape.planner.plan import PlanError
from kvtape.planner.scores import MassHistory
from kvtape.planner.specs import SpecError
from kvtape.traces.errors import LogWriteFailed

__all__ = ["GuardedSession", "Snapshot"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a restore brings back: the engine's state in its envelope, and the session's own account."""

    blob: bytes
    tape: tuple[int, ...]
    catalog: CatalogState
    history: MassHistory
    carried: AttentionMass | None


_FATAL_OF = {
    "ensure_prefix": FatalClass.PREFILL_FAILED,
    "prefill_suffix": FatalClass.PREFILL_FAILED,
    "decode": FatalClass.DECODE_FAILED,
    "restore": FatalClass.STATE_RESTORE_FAILED,
}

_TAKEN_BACK = {Cancelled: "cancelled", ChoiceFailed: "choice_failed", ContextOverflow: "overflow"}


class GuardedSession:
    """The part of `Session` that knows how an operation may end."""

    def __init__(self, parts: Parts, shadow: Shadow | None = None) -> None:
        self._parts = parts
        self._shadow = shadow
        self._exclusive = Exclusive()
        self._fatal: SessionFatal | None = None
        self._closed = False
        self._released = False
        self._snapshots: dict[int, Snapshot] = {}

    def cancel(self) -> None:
        """Ask the running operation to stop, from any thread; it raises Cancelled."""
        self._parts.backend.cancel()
        if self._shadow is not None:
            self._shadow.cancel()

    @property
    def fatal(self) -> SessionFatal | None:
        """The first failure, and that of every later call; None while there is none."""
        return self._fatal

    @property
    def ended(self) -> bool:
        """Whether every call is refused from now on: after a close, a fatal, or a log that cannot be written."""
        return self._closed or self._fatal is not None

    def close(self, reason: str = "asked") -> None:
        """End the session in the ordinary way, for `reason`; idempotent, and allowed after a fatal.

        An operation that runs in another thread is cancelled first.
        """
        with self._exclusive.hold("close", urge=self.cancel):
            self._end("fatal" if self._fatal else reason)

    def lose(self, cause: str) -> None:
        """What held the native context is gone, while no operation ran: fatal, device_lost. Idempotent."""
        with self._exclusive.hold("lose"):
            if not self.ended:
                self._go_fatal(FatalClass.DEVICE_LOST, cause)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def _operation(self, name: str) -> Iterator[None]:
        with self._exclusive.hold(name), self._guarded(name):
            yield
            if self._shadow is not None:
                self._shadow.follow(self._parts, computed=name != "restore")

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        if self._fatal is not None:
            raise SessionFatal(self._fatal.fatal_class, self._fatal.cause_message)
        if self._closed:
            raise SessionClosed(f"{name}: the session was closed; open another")
        try:
            yield
        except EngineFault as fault:
            raise self._go_fatal(fault.fatal_class, fault.cause) from fault
        except (UsageError, Cancelled, BlockError, PlanError, SpecError) as err:
            if not self._closed:
                self._record_refusal(name, err)
            raise
        except LogWriteFailed:
            self._abandon()
            raise
        except Exception as err:
            # Whatever it was, it left the engine and the fold in doubt of each other.
            raise self._go_fatal(_FATAL_OF.get(name, FatalClass.STREAM_NOT_REVERSIBLE), repr(err)) from err
        except BaseException:
            # Ctrl-C may strike between any two steps, also between an engine's work and its event.
            with suppress(Exception):
                self._end("interrupted")
            raise

    def _go_fatal(self, fatal_class: FatalClass, message: str) -> SessionFatal:
        """Record the first cause, free the native context for good, and give the error to raise."""
        self._fatal = SessionFatal(fatal_class, message)
        self._parts.logits = None
        try:
            self._parts.journal.emit(Op.FATAL, self._parts.now(), error_class=str(fatal_class), reason=message)
        finally:
            self._release()
        return self._fatal

    def _end(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._parts.journal.emit(Op.CLOSE, self._parts.now(), reason=reason)
        finally:
            self._release()

    def _abandon(self) -> None:
        """The log cannot be written any more: what the engine does could not be told, so the session ends here."""
        self._closed = True
        self._release()

    def _release(self) -> None:
        """Free the native context, the cold store and the snapshots; once."""
        if self._released:
            return
        self._released = True
        self._parts.backend.close()
        if self._shadow is not None:
            self._shadow.close()
        if self._parts.drafter is not None:
            self._parts.drafter.close()
        if self._parts.cold is not None:
            self._parts.cold.clear()
        self._snapshots.clear()

    def _record_refusal(self, operation: str, err: Exception) -> None:
        detail = None
        if isinstance(err, ContextOverflow):
            detail = json.dumps({"available": err.available, "needed": err.needed})
        try:
            self._parts.journal.emit(
                Op.REFUSE,
                self._parts.now(),
                error_class=type(err).__name__,
                reason=f"{operation}: {err}",
                detail=detail,
            )
        except LogWriteFailed:
            self._abandon()
            raise

    def _settle(self, *, folded: bool = False) -> None:
        """Compute what waits (`backends.deferred`). Refused or cancelled, all of it waits again, or what is left of it
        once rows were evicted; a cancelled one that evicted closes the session, as without deferral.
        """
        if self._parts.pending:
            with deferred.kept_on_refusal(self._parts), self._roll_back(len(self._parts.tape)):
                deferred.flush(self._parts, folded=folded)

    @contextmanager
    def _roll_back(self, tape_length: int) -> Iterator[None]:
        """Take back what a cancelled or failed operation had computed, unless it has evicted meanwhile.

        Then a cancelled one closes the session; otherwise it goes on with the tokens that went in. Taken back whole,
        it also leaves the next plan due when it was before.
        """
        evictions, logits, since_plan = self._parts.evictions, self._parts.logits, self._parts.tokens_since_plan
        try:
            yield
        except (Cancelled, UsageError) as err:
            if self._parts.evictions != evictions:
                if isinstance(err, Cancelled):
                    self._parts.logits = None
                    self._end("asked")
            else:
                if len(self._parts.tape) > tape_length:
                    surgery.truncate(self._parts, tape_length, _TAKEN_BACK.get(type(err), "refused"))
                    self._parts.logits = logits
                self._parts.tokens_since_plan = since_plan
            raise
