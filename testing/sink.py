"""A sink that keeps what a session records in lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtape.planner.events import Event
from kvtape.planner.rows import BlockRow, PlanRow, ScoreRow, SessionRow

__all__ = ["ListSink"]


@dataclass
class ListSink:
    """An `EventSink` in memory: everything is acknowledged at once. `tokens` by seq of the event that bore them."""

    sessions: list[SessionRow] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    plans: list[PlanRow] = field(default_factory=list)
    blocks: list[BlockRow] = field(default_factory=list)
    scores: list[ScoreRow] = field(default_factory=list)

    def open_session(self, row: SessionRow) -> None:
        self.sessions.append(row)

    def record(
        self,
        event: Event,
        *,
        tokens: Sequence[int] | None = None,
        plan: PlanRow | None = None,
        blocks: Sequence[BlockRow] = (),
        scores: Sequence[ScoreRow] = (),
    ) -> None:
        self.events.append(event)
        if tokens is not None:
            self.tokens[event.seq] = tuple(tokens)
        if plan is not None:
            self.plans.append(plan)
        self.blocks += blocks
        self.scores += scores

    def flush(self) -> int:
        return len(self.events)
