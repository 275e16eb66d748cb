"""Between a simulated session and its log: the planner's own time is charged here, for no engine knows of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvtape.backends.modelled.work import CostModel, Timeline, Work
from kvtape.backends.protocol import EventSink
from kvtape.planner.events import Event, Op
from kvtape.planner.residency import RESIDENCY_OPS
from kvtape.planner.rows import BlockRow, PlanRow, ScoreRow, SessionRow

__all__ = ["ChargingSink"]


class ChargingSink:
    """Hands everything on to `sinks`. A plan takes what plans take, and says so; what passes between two events too."""

    def __init__(self, sinks: Sequence[EventSink], costs: CostModel, timeline: Timeline) -> None:
        self._sinks, self._costs, self._time = sinks, costs, timeline
        self._resident = 0

    def open_session(self, row: SessionRow) -> None:
        self._resident = 0
        for sink in self._sinks:
            sink.open_session(row)

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
            self._resident = event.resident_tokens
        if event.op == Op.PLAN:
            ns = self._costs.cost_ns(Work("plan", 0, self._resident))
            self._time.spend(ns)
            event = replace(event, elapsed_ns=(event.elapsed_ns or 0) + ns)
        for sink in self._sinks:
            sink.record(event, tokens=tokens, plan=plan, blocks=blocks, scores=scores)
        if event.op in RESIDENCY_OPS:
            self._time.spend(self._costs.cost_ns(Work("session")))

    def flush(self) -> int:
        return min((sink.flush() for sink in self._sinks), default=0)
