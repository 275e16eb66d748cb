"""Progress on stderr: a bar on a terminal, now and then a line elsewhere; both with a rate and the time that is left.

`KVTAPE_PROGRESS` says it otherwise: `bar`, `lines` or `none`. A terminal that cannot move its cursor (TERM=dumb) gets
lines. With NO_COLOR the bar has no colours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Protocol

from kvtape.backends.clock import MonotonicClock
from kvtape.backends.sinks import WatchingSink
from kvtape.cli.progress_lines import Lines

if TYPE_CHECKING:
    from rich.progress import ProgressColumn, Task

    from kvtape.backends.protocol import EventSink
    from kvtape.planner.events import Event

__all__ = ["VARIABLE", "Progress", "Style", "WatchedSink", "progress", "style"]

VARIABLE = "KVTAPE_PROGRESS"
Style = Literal["bar", "lines", "none"]


class Progress(Protocol):
    def update(self, done: int, total: int, what: str = "") -> None:
        """Show `done` of `total`; a total of 0 means that it is not known."""


class _Silent:
    def update(self, done: int, total: int, what: str = "") -> None:
        pass


def style(environment: Mapping[str, str], *, terminal: bool) -> Style:
    """How progress is shown. Raises UsageError for a word that says nothing."""
    from kvtape.backends.errors import UsageError

    asked = environment.get(VARIABLE, "")
    if asked not in ("", "bar", "lines", "none"):
        raise UsageError(f"{VARIABLE}={asked} is not understood; set it to bar, lines or none, or leave it unset")
    if asked:
        return asked  # type: ignore[return-value]
    return "bar" if terminal and environment.get("TERM") != "dumb" else "lines"


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """A display of how far the block is."""
    chosen = style(os.environ, terminal=sys.stderr.isatty())
    if chosen == "none":
        yield _Silent()
    elif chosen == "lines":
        yield Lines(title, sys.stderr, MonotonicClock())
    else:
        with _bar(title) as bar:
            yield bar


@contextmanager
def _bar(title: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    from kvtape.cli.output import colour_system

    columns = (
        # A file's or a session's name may have brackets, which are no markup.
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        _rate_column(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True, color_system=colour_system()), transient=True) as bars:
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
