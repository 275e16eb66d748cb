"""`kvtape import --follow`: what becomes of a log that a server is still writing."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtape.traces.importers.importing import ImportResult

__all__ = ["Following", "Pace", "follow", "stopping"]


class Pace:
    """The machine's monotonic clock, and a pause that ends early once `stop` was called, from a signal handler too."""

    def __init__(self) -> None:
        from kvtape.backends.clock import MonotonicClock

        self._clock = MonotonicClock()
        self._heard, self._said = os.pipe()
        self.stopped = False

    def now_ns(self) -> int:
        return self._clock.now_ns()

    def pause(self, seconds: float) -> None:
        select.select([self._heard], [], [], seconds)

    def stop(self) -> None:
        self.stopped = True
        os.write(self._said, b".")

    def close(self) -> None:
        os.close(self._heard)
        os.close(self._said)


@contextmanager
def stopping() -> Iterator[Pace]:
    """A pace that Ctrl-C and SIGTERM stop; a second signal does what it always does."""
    pace = Pace()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(number: int, frame: FrameType | None) -> None:
        restore()
        pace.stop()

    for number in before:
        signal.signal(number, stop)
    try:
        yield pace
    finally:
        restore()
        pace.close()


class Following:
    """What came of it: the log that was written (`None`: no row came, so there is none), and events that came again."""

    def __init__(self, log: Path | None, result: ImportResult, resent: int) -> None:
        self.log, self.result, self.resent = log, result, resent


def follow(
    file: str, log: Path, format_name: str, *, content: bool, wait_s: float | None, quiet_s: float | None
) -> Following:
    """Follow until Ctrl-C, SIGTERM, the end of a pipe, or `quiet_s` without anything new; the log is then sealed.

    Raises TraceError and its kin.
    """
    from kvtape.cli.output import kvtape_version, note
    from kvtape.traces.importers.continuing import begin, followable
    from kvtape.traces.importers.follow import Followed, Follower
    from kvtape.traces.importers.followed import Patience

    reader = followable(format_name)
    with stopping() as pace:
        beginning = begin(file, log, reader, content=content)
        if beginning.note:
            note(f"kvtape: {beginning.note}")
        asked = Followed(
            reader,
            beginning.tail,
            beginning.place,
            beginning.source,
            Patience(wait_s, quiet_s),
            content=content,
            keep_mark=beginning.in_folder,
        )
        follower = Follower(asked, beginning.log, pace, kvtape_version=kvtape_version(), resume=beginning.resume)
        note(f"kvtape: following {beginning.tail.name} into {beginning.log}; Ctrl-C ends it and seals the log")
        result = follower.run()
    return Following(beginning.log if beginning.log.exists() else None, result, follower.resent)
