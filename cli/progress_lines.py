"""Progress where there is no terminal: a plain line once work turns out to be long, and then now and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from kvtape.backends.protocol import Clock

__all__ = ["EVERY_NS", "FIRST_NS", "Lines"]

FIRST_NS: Final = 5 * 10**9
"""Work that is done by then says nothing: a script that runs many short commands gets no noise."""

EVERY_NS: Final = 10 * 10**9


class Lines:
    """`kvtape: replaying main: 120 of 2000 (6 %), 24/s, 1:18 left` on `stream`.

    The rate is that since the count last began anew: a smaller count than before, or another total, is other work.
    """

    def __init__(self, title: str, stream: TextIO, clock: Clock) -> None:
        self._title = title
        self._stream = stream
        self._clock = clock
        self._said_at = clock.now_ns() + FIRST_NS - EVERY_NS
        self._total = -1
        self._began = (0, 0)
        self._done = 0

    def update(self, done: int, total: int, what: str = "") -> None:
        """Take note of it, and say it when it is time. 0: the total is not known."""
        now = self._clock.now_ns()
        if done < self._done or total != self._total:
            self._began = (now, done)
        self._done, self._total = done, total
        if now - self._said_at >= EVERY_NS:
            self._said_at = now
            print(f"kvtape: {self._line(now, what)}", file=self._stream, flush=True)

    def _line(self, now: int, what: str) -> str:
        seconds, more = (now - self._began[0]) / 1e9, self._done - self._began[1]
        of = f" of {self._total} ({100 * self._done // self._total} %)" if self._total else ""
        parts = [f"{f'{self._title} {what}'.rstrip()}: {self._done}{of}"]
        if seconds > 0 and more > 0:
            rate = more / seconds
            parts.append(f"{rate:.3g}/s")
            if self._total:
                parts.append(f"{_minutes((self._total - self._done) / rate)} left")
        return ", ".join(parts)


def _minutes(seconds: float) -> str:
    """`1:18`, or `2:03:40`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
