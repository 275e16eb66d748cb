"""Event sinks that look at what passes: each says in `see` what it makes of an event, the rest is done here once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtape.backends.protocol import EventSink
    from kvtape.planner.events import Event
    from kvtape.planner.rows import BlockRow, PlanRow, ScoreRow, SessionRow

__all__ = ["WatchingSink"]


class WatchingSink:
    """An `EventSink` that hands everything on to `then`, where there is one, and sees every event after that."""

    then: EventSink | None = None

    def see(self, event: Event) -> None:
        """Nothing, unless a subclass says so."""

    def open_session(self, row: SessionRow) -> None:
        if self.then is not None:
            self.then.open_session(row)

    def record(
        self,
        event: Event,
        *,
        tokens: Sequence[int] | None = None,
        plan: PlanRow | None = None,
        blocks: Sequence[BlockRow] = (),
        scores: Sequence[ScoreRow] = (),
    ) -> None:
        if self.then is not None:
            self.then.record(event, tokens=tokens, plan=plan, blocks=blocks, scores=scores)
        self.see(event)

    def flush(self) -> int:
        return 0 if self.then is None else self.then.flush()
