"""A source that grows: what readers of files read from, and do not notice that it waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from kvtape.traces.importers.errors import SourceRejected
from kvtape.traces.importers.feed import LineFeed
from kvtape.traces.importers.source import Source
from kvtape.traces.importers.tail import Tail

__all__ = ["FollowedSource", "Pace", "Patience"]

_BOM = b"\xef\xbb\xbf"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
"""Between looks that find nothing; each pause is twice the one before."""


class Pace(Protocol):
    """Time, as a follower sees it."""

    def now_ns(self) -> int: ...

    def pause(self, seconds: float) -> None:
        """Wait, or less when it is asked to stop."""

    @property
    def stopped(self) -> bool:
        """Whether somebody asked it to stop."""


class Patience:
    """How long to wait, in seconds: `file_s` for the file to come, `quiet_s` for anything new in it. None: for ever."""

    def __init__(self, file_s: float | None = None, quiet_s: float | None = None) -> None:
        self.file_s, self.quiet_s = file_s, quiet_s

    def over(self, tail: Tail, waited_ns: int) -> bool:
        """Whether to end, after so long without anything new. Raises SourceRejected where the file never came."""
        if not tail.there:
            if self.file_s is not None and waited_ns >= self.file_s * 1e9:
                what = f"no such file after {self.file_s:g} s"
                raise SourceRejected(tail.name, None, None, what, "look at its name, or wait longer with --wait")
            return False
        return self.quiet_s is not None and waited_ns >= self.quiet_s * 1e9


class FollowedSource(Source):
    """Lines as they come. `between` is called after each look, with whether it found nothing.

    Its end is that of a pipe, or of the patience, or that it was asked to stop. A last line without an end counts,
    except where it was asked to stop: then the rest of the line may still come.
    """

    def __init__(  # no super().__init__: there is nothing to open, and nothing to look at beforehand
        self, tail: Tail, feed: LineFeed, pace: Pace, patience: Patience, between: Callable[[bool], None]
    ) -> None:
        self.name = self.stem = tail.name
        self.line = feed.line
        self.repeated: list[int] = []
        self.leaves_out_repeated = False
        self.head = b""
        self._tail, self._feed, self._pace, self._patience = tail, feed, pace, patience
        self._between = between

    def lines(self, *, drop_repeated: bool = False) -> Iterator[bytes]:
        """Lines without their ends, blank ones left out. `drop_repeated` is for files that can be looked at whole."""
        quiet_from, pause = self._pace.now_ns(), _FIRST_PAUSE_S
        while not self._pace.stopped:
            piece = self._tail.look()
            if piece is None:
                break
            if piece.data:
                yield from self._cleaned(self._feed.push(piece))
                quiet_from, pause = self._pace.now_ns(), _FIRST_PAUSE_S
                self._between(False)
                continue
            self._between(True)
            if self._patience.over(self._tail, self._pace.now_ns() - quiet_from):
                break
            self._pace.pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        if not self._pace.stopped:
            yield from self._cleaned(self._feed.rest())

    def _cleaned(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        for raw in lines:
            self.line = self._feed.line
            line = (raw.removeprefix(_BOM) if self.line == 1 else raw).strip()
            if line:
                yield line

    def read(self) -> bytes:
        raise self.rejected(None, "this form of the format has no lines", "import it without --follow", whole=True)

    def digest(self) -> str:
        raise NotImplementedError("what grows has no digest")

    def close(self) -> None:
        self._tail.close()
