"""Clocks that a session can be handed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtape.backends.protocol import Clock

__all__ = ["ManualClock", "MonotonicClock", "StoppableClock", "WallClock", "utc_day"]


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()


class WallClock:
    """Nanoseconds since 1970. For the day that a proof bears, and for nothing that is computed from."""

    def now_ns(self) -> int:
        return time.time_ns()  # noqa: TID251 - this is the injected clock


class ManualClock:
    """Advances by `step_ns` at each look: for tests and for runs whose bytes must repeat."""

    def __init__(self, step_ns: int = 1) -> None:
        self._now = 0
        self._step = step_ns

    def now_ns(self) -> int:
        self._now += self._step
        return self._now


class StoppableClock:
    """Another clock, without the time that passed while this one was stopped."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left_out = 0
        self._stopped_at: int | None = None

    def now_ns(self) -> int:
        now = self._clock.now_ns() if self._stopped_at is None else self._stopped_at
        return now - self._left_out

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stand still while the body runs. Not to be nested, nor shared by sessions that run at the same time."""
        began = self._stopped_at = self._clock.now_ns()
        try:
            yield
        finally:
            self._stopped_at = None
            self._left_out += self._clock.now_ns() - began


def utc_day(clock: Clock) -> str:
    """YYYY-MM-DD in UTC, of a clock that counts from 1970."""
    return datetime.fromtimestamp(clock.now_ns() // 10**9, UTC).date().isoformat()
