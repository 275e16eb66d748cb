"""Every error a backend or a session raises.

KvtapeError                     message = what, where, what to do; `exit_code` is what the command line returns
|-- UsageError          (2)     bad input: spec, file, sizes
|   |-- InputRejected           token id, position, size or text that an engine must not see
|   |-- ContextOverflow         more tokens than the context can hold under this policy
|   |-- SessionBusy             another operation of the session is running; this one was not begun nor recorded
|   |-- StaleSlot               a handle of a slot that has moved on; nothing was touched
|   |-- SlotBusy                the slot is leased or changing; nothing was touched
|   |-- NoFreeSlot              every slot of the pool is leased or changing
|   |-- UnknownBlock            no such block in the cold store; no such snapshot
|   |-- StateRejected           a saved state of another model, layout or KV type; nothing was touched
|   `-- UnsupportedOperation    the session's capabilities do not have it; nothing was touched
|-- EnvironmentProblem  (3)     engine or extra missing, disk full
|-- Cancelled           (130)   asked for; the state is that of the operation's start
|-- SessionClosed       (2)     the session was closed in the ordinary way
|-- EngineFault         (1)     raised by a backend: its native context must not be used again
`-- SessionFatal        (1)     raised by a session: the first cause, and that of every later call
"""

from __future__ import annotations

from enum import StrEnum

__all__ = [
    "Cancelled",
    "ChoiceFailed",
    "ContextOverflow",
    "EngineFault",
    "EnvironmentProblem",
    "FatalClass",
    "InputRejected",
    "KvtapeError",
    "NoFreeSlot",
    "SessionBusy",
    "SessionClosed",
    "SessionFatal",
    "SlotBusy",
    "StaleSlot",
    "StateRejected",
    "UnknownBlock",
    "UnsupportedOperation",
    "UsageError",
]


class KvtapeError(Exception):
    exit_code = 1


class UsageError(KvtapeError):
    exit_code = 2


class InputRejected(UsageError):
    pass


class ChoiceFailed(UsageError):
    pass


class ContextOverflow(UsageError):
    """Names both numbers: the tokens that are needed and the context that is there."""

    def __init__(self, needed: int, available: int, why: str) -> None:
        super().__init__(f"{needed} tokens do not fit a context of {available}: {why}")
        self.needed = needed
        self.available = available


class SessionBusy(UsageError):
    pass


class StaleSlot(UsageError):
    """Names the slot, the handle's generation and the slot's own (None for a lease that is over)."""

    def __init__(self, slot: int, generation: int, current: int | None) -> None:
        now = "its lease is over" if current is None else f"the slot is at {current}"
        super().__init__(f"slot {slot}, generation {generation}: {now}; acquire a new one")
        self.slot = slot
        self.generation = generation
        self.current = current


class SlotBusy(UsageError):
    pass


class NoFreeSlot(UsageError):
    pass


class UnknownBlock(UsageError):
    pass


class StateRejected(UsageError):
    pass


class UnsupportedOperation(UsageError):
    """Names the operation and the capability that is false, with the reason."""

    def __init__(self, operation: str, why: str) -> None:
        super().__init__(f"{operation} is not possible here: {why}")
        self.operation = operation


class EnvironmentProblem(KvtapeError):
    exit_code = 3


class Cancelled(KvtapeError):
    exit_code = 130


class SessionClosed(KvtapeError):
    exit_code = 2


class FatalClass(StrEnum):
    ALLOCATOR_EXHAUSTED = "allocator_exhausted"
    PREFILL_FAILED = "prefill_failed"
    DECODE_FAILED = "decode_failed"
    STATE_RESTORE_FAILED = "state_restore_failed"
    DEVICE_LOST = "device_lost"
    STREAM_NOT_REVERSIBLE = "stream_not_reversible"


class EngineFault(KvtapeError):
    """The engine failed inside an operation; the session must go fatal with `fatal_class`, because of `cause`."""

    def __init__(self, fatal_class: FatalClass, cause: str) -> None:
        super().__init__(f"{fatal_class}: {cause}")
        self.fatal_class = fatal_class
        self.cause = cause


class SessionFatal(KvtapeError):
    """Carries the first cause: its class and its message."""

    def __init__(self, fatal_class: FatalClass, message: str) -> None:
        super().__init__(f"the session is poisoned by its first failure, {fatal_class}: {message}")
        self.fatal_class = fatal_class
        self.cause_message = message
