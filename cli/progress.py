"""Progress on stderr: a bar on a terminal, nothing in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from kvtape.backends.sinks import WatchingSink

if TYPE_CHECKING:
    from rich.progress import ProgressColumn, Task

    from kvtape.backends.protocol import EventSink
    from kvtape.planner.events import Event

__all__ = ["Progress", "WatchedSink", "progress"]


class Progress(Protocol):
    def update(self, done: int, total: int, what: str = "") -> None:
        """Show `done` of `total`; a total of 0 means that it is not known."""


class _Silent:
    def update(self, done: int, total: int, what: str = "") -> None:
        pass


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """A progress display for the block; silent unless stderr is a terminal."""
    if not sys.stderr.isatty():
        yield _Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _rate_column(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=None)

        class Bar:
            def update(self, done: int, total: int, what: str = "") -> None:
                bars.update(task, completed=done, total=total or None, description=f"{title} {what}".rstrip())

        yield Bar()


def _rate_column() -> ProgressColumn:
    """How many are done in a second, as the bar measures it."""
    from rich.progress import ProgressColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:.3g}/s")

    return Rate()


class WatchedSink(WatchingSink):
    """An event sink that shows the tape growing while it hands everything on."""

    def __init__(self, sink: EventSink, shown: Progress, expected_tokens: int) -> None:
        self.then = sink
        self._shown = shown
        self._expected = expected_tokens

    def see(self, event: Event) -> None:
        if event.op in ("prefill", "decode") and event.stop is not None:
            self._shown.update(event.stop, max(self._expected, event.stop), str(event.op))
