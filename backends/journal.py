"""The session's own account: the fold, and every event on its way to the log.

An event is folded before it is recorded, so an illegal one never reaches the log, and the digests that an event
bears are those of the fold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvtape.backends.protocol import Clock, EventSink
from kvtape.planner.blocks import Block
from kvtape.planner.events import Event, Op
from kvtape.planner.layout import layout_digest
from kvtape.planner.residency import RESIDENCY_OPS, ResidencyState, apply
from kvtape.planner.rows import BlockRow, PlanRow, ScoreRow

__all__ = ["COUNTERS", "Journal"]

COUNTERS = (
    "reused",
    "forgotten",
    "prefilled",
    "dropped",
    "suffix",
    "prompt_tokens",
    "completion_tokens",
    "physical_prefill_calls",
    "physical_prefill_tokens",
    "deferred_prefill_calls",
    "deferred_prefill_tokens",
    "decode_calls",
    "drafted_tokens",
    "accepted_tokens",
    "rejected_tokens",
    "recomputed_tokens",
)


class Journal:
    """Sequence numbers, the fold and the totals of one session."""

    def __init__(self, sink: EventSink, clock: Clock, run_id: str, session_id: str) -> None:
        self.run_id = run_id
        self.session_id = session_id
        self.clock = clock
        self.state = ResidencyState()
        self.totals: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._sink = sink

    @property
    def next_seq(self) -> int:
        return self.state.next_seq

    def block_rows(self, blocks: Sequence[Block], *, truncated: bool = False) -> list[BlockRow]:
        """Rows for blocks that the next event gives their range; `truncated`: it is one that ends a generation."""
        return [
            BlockRow(
                run_id=self.run_id,
                session_id=self.session_id,
                seq=self.next_seq,
                block_id=b.block_id,
                generation=self.state.generation + truncated,
                start=b.start,
                stop=b.stop,
                segment=b.kind,
                cache_class=str(b.cache_class),
            )
            for b in blocks
        ]

    def emit(
        self,
        op: Op,
        began_ns: int,
        *,
        tokens: Sequence[int] | None = None,
        plan: PlanRow | None = None,
        block_rows: Sequence[BlockRow] = (),
        score_rows: Sequence[ScoreRow] = (),
        **columns: Any,
    ) -> Event:
        """Fold and record one event. Raises IllegalEvent when the operation cannot have happened here."""
        turns = 1 if op is Op.PROMPT and columns.get("reason") != "suffix" else 0
        generations = 1 if op in (Op.TRUNCATE, Op.RESTORE) else 0
        event = Event(
            run_id=self.run_id,
            session_id=self.session_id,
            seq=self.state.next_seq,
            at_ns=began_ns,
            op=op,
            turn=self.state.turn + turns,
            generation=self.state.generation + generations,
            **columns,
        )
        after = apply(self.state, event)
        if op in RESIDENCY_OPS:
            event = replace(
                event,
                resident_tokens=after.resident_tokens,
                resident_digest=after.resident.digest(),
                layout_digest=layout_digest(after.layout),
            )
        self._sink.record(event, tokens=tokens, plan=plan, blocks=block_rows, scores=score_rows)
        self.state = after
        for name in COUNTERS:
            self.totals[name] += columns.get(name) or 0
        return event
