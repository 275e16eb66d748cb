"""Progress on stderr: a bar on a terminal, nothing in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvtape.backends.protocol import EventSink
    from kvtape.planner.events import Event
    from kvtape.planner.rows import BlockRow, PlanRow, ScoreRow, SessionRow

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
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=None)

        class Bar:
            def update(self, done: int, total: int, what: str = "") -> None:
                bars.update(task, completed=done, total=total or None, description=f"{title} {what}".rstrip())

        yield Bar()


class WatchedSink:
    """An event sink that shows the tape growing while it hands everything on."""

    def __init__(self, sink: EventSink, shown: Progress, expected_tokens: int) -> None:
        self._sink = sink
        self._shown = shown
        self._expected = expected_tokens

    def open_session(self, row: SessionRow) -> None:
        self._sink.open_session(row)

    def record(
        self,
        event: Event,
        *,
        tokens: Sequence[int] | None = None,
        plan: PlanRow | None = None,
        blocks: Sequence[BlockRow] = (),
        scores: Sequence[ScoreRow] = (),
    ) -> None:
        self._sink.record(event, tokens=tokens, plan=plan, blocks=blocks, scores=scores)
        if event.op in ("prefill", "decode") and event.stop is not None:
            self._shown.update(event.stop, max(self._expected, event.stop), str(event.op))

    def flush(self) -> int:
        return self._sink.flush()
