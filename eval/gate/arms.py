"""What the gate is handed: a way to open the plain and the optimised session, and clocks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, Protocol

from kvtape.backends.protocol import Clock
from kvtape.backends.session import Session

__all__ = ["Arm", "Arms", "Meter", "ProcessClock"]

Arm = Literal["plain", "optimised"]


class Arms(Protocol):
    """Opens the sessions of a cell: equal but for the optimisation."""

    def open(self, arm: Arm, session_id: str) -> Session: ...

    def used(self, session: Session) -> int:
        """How often the optimisation came into play in an optimised session so far; 0 when it never did."""


class ProcessClock:
    """CPU time of this process, all of its threads, in nanoseconds."""

    def now_ns(self) -> int:
        return time.process_time_ns()


@dataclass(frozen=True, slots=True)
class Meter:
    """Both times of a turn. `threads` that the engine computes with: with more than one CPU time is no turn time."""

    wall: Clock
    cpu: Clock
    threads: int = 1
