"""How much was resident at most, from the events themselves as they pass to the log."""

from __future__ import annotations

from collections.abc import Sequence

from kvtape.backends.protocol import EventSink
from kvtape.planner.events import Event
from kvtape.planner.rows import BlockRow, PlanRow, ScoreRow, SessionRow

__all__ = ["PeakSink"]


class PeakSink:
    """Hands everything on; `most` has each session's largest `resident_tokens`."""

    def __init__(self, sink: EventSink) -> None:
        self.most: dict[str, int] = {}
        self._sink = sink

    def open_session(self, row: SessionRow) -> None:
        self.most[row.session_id] = 0
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
        if event.resident_tokens is not None:
            self.most[event.session_id] = max(self.most[event.session_id], event.resident_tokens)
        self._sink.record(event, tokens=tokens, plan=plan, blocks=blocks, scores=scores)

    def flush(self) -> int:
        return self._sink.flush()
