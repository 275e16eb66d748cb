"""What an operation does, as far as its cost can depend on it; who prices it, and who lets the time pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["CostModel", "Timeline", "Work", "WorkKind"]

WorkKind = Literal[
    "prefill",
    "decode",
    "truncate",
    "evict",
    "shift",
    "export",
    "admit",
    "refill",
    "rebuild",
    "score",
    "snapshot",
    "restore",
    "plan",
    "session",
]
"""The backend's operations; `plan` is the planner's own time, `session` what passes between two events."""


@dataclass(frozen=True, slots=True)
class Work:
    """One operation. `tokens` it computes or moves, `resident` rows before it, `n_bytes` of state it carries.

    `behind`: resident rows that stand behind the place where it puts rows; an engine may have to write those again.

    `turned`: rows whose keys a pending shift still has to rotate, which the next operation that touches the
    engine pays for. A decode of n tokens is one piece of work, whatever n is.
    """

    kind: WorkKind
    tokens: int = 0
    resident: int = 0
    n_bytes: int = 0
    turned: int = 0
    behind: int = 0


class CostModel(Protocol):
    """Prices work. Raises UsageError for work that it knows nothing of."""

    def cost_ns(self, work: Work) -> int:
        """Whole nanoseconds, 0 or more."""


class Timeline(Protocol):
    """A clock that work can be done on."""

    def now_ns(self) -> int: ...

    def spend(self, ns: int) -> None:
        """Let `ns` nanoseconds pass."""

    def carry(self, ns: int, n_bytes: int) -> None:
        """Move `n_bytes` to or from the cold store, which by itself would take `ns`."""
