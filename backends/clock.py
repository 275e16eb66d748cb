"""Clocks that a session can be handed."""

from __future__ import annotations

import time

__all__ = ["ManualClock", "MonotonicClock"]


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()


class ManualClock:
    """Advances by `step_ns` at each look: for tests and for runs whose bytes must repeat."""

    def __init__(self, step_ns: int = 1) -> None:
        self._now = 0
        self._step = step_ns

    def now_ns(self) -> int:
        self._now += self._step
        return self._now
