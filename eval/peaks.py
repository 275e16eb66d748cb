"""How much was resident at most, from the events themselves as they pass to the log."""

from __future__ import annotations

from kvtape.backends.protocol import EventSink
from kvtape.backends.sinks import WatchingSink
from kvtape.planner.events import Event
from kvtape.planner.rows import SessionRow

__all__ = ["PeakSink"]


class PeakSink(WatchingSink):
    """Hands everything on; `most` has each session's largest `resident_tokens`."""

    def __init__(self, sink: EventSink) -> None:
        self.then = sink
        self.most: dict[str, int] = {}

    def open_session(self, row: SessionRow) -> None:
        self.most[row.session_id] = 0
        super().open_session(row)

    def see(self, event: Event) -> None:
        if event.resident_tokens is not None:
            self.most[event.session_id] = max(self.most[event.session_id], event.resident_tokens)
