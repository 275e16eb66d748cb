"""Legal sessions written by hand: events with the digests that the fold gives, tokens beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from kvtape.planner import residency
from kvtape.planner.events import BlockRef, Event, Op, Placement, Way
from kvtape.planner.layout import layout_digest
from kvtape.planner.residency import ResidencyState
from kvtape.planner.rows import TokensRow

__all__ = ["Script"]


class Script:
    """Builds a session event by event; an illegal one raises at once. `events`, `tokens` are what a log would give."""

    def __init__(self, n_ctx: int = 256, session_id: str = "s0", run_id: str = "r0") -> None:
        self.events: list[Event] = []
        self.tokens: dict[int, TokensRow] = {}
        self.state = ResidencyState()
        self.session_id, self.run_id = session_id, run_id
        self._tape: list[int] = []
        self._saved: dict[int, list[int]] = {}
        self._next_block = 0
        self._put(Op.OPEN, n_tokens=n_ctx)

    def prefill(self, tokens: list[int]) -> None:
        self._extend(Op.PREFILL, tokens)

    def decode(self, tokens: list[int]) -> None:
        self._extend(Op.DECODE, tokens)

    def evict(self, start: int, stop: int, *, cold: bool = False, way: Way = Way.GAP) -> list[int]:
        """Evict `[start, stop)`, as one block when cold; the shift of the rebased way is an event of its own."""
        blocks = (BlockRef(self._next_block, start, stop),) if cold else None
        self._next_block += cold
        before = self.state
        self._put(Op.EVICT, start=start, stop=stop, n_tokens=stop - start, way=way, cold=cold, blocks=blocks)
        if way == Way.REBASED:
            gap = next(
                s.cache_start + start - s.tape_start for s in before.layout if s.tape_start <= start < s.tape_stop
            )
            self.shift(gap + stop - start, before.next_cache_position, start - stop)
        return [b.block_id for b in blocks or ()]

    def shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        moved = any(s.cache_stop > cache_start and s.cache_start < cache_stop for s in self.state.layout)
        if moved and delta:
            self._put(Op.SHIFT, start=cache_start, stop=cache_stop, delta=delta, way=Way.REBASED)

    def admit(self, block_id: int, *, append: bool = False) -> None:
        block = self.state.cold_block(block_id)
        assert block is not None
        at = self.state.next_cache_position if append else block.cache_start
        self._put(
            Op.ADMIT,
            block_id=block_id,
            start=block.start,
            stop=block.stop,
            n_tokens=block.stop - block.start,
            cache_start=at,
            placement=Placement.APPEND if append else Placement.IN_PLACE,
            way=Way.IMPORT,
        )

    def refill(self, start: int, stop: int, cache_start: int) -> None:
        tokens = self._tape[start:stop]
        self._put(
            Op.RECOMPUTE,
            _tokens=tokens,
            start=start,
            stop=stop,
            n_tokens=stop - start,
            cache_start=cache_start,
            placement=Placement.IN_PLACE,
            way=Way.RECOMPUTE,
        )

    def truncate(self, cut: int, *, way: Way = Way.GAP) -> None:
        del self._tape[cut:]
        self._put(Op.TRUNCATE, start=cut, way=way)

    def snapshot(self) -> int:
        snapshot_id = len(self._saved)
        self._saved[snapshot_id] = list(self._tape)
        self._put(Op.SNAPSHOT, snapshot_id=snapshot_id)
        return snapshot_id

    def restore(self, snapshot_id: int) -> None:
        self._tape = list(self._saved[snapshot_id])
        self._put(Op.RESTORE, snapshot_id=snapshot_id)

    def refuse(self) -> None:
        self._put(Op.REFUSE, error_class="ContextOverflow", reason="asked for too much")

    def fatal(self) -> None:
        self._put(Op.FATAL, error_class="decode_failed", reason="provoked")

    def close(self) -> None:
        self._put(Op.CLOSE)

    def put_raw(self, op: Op, **fields: Any) -> None:
        self._put(op, **fields)

    def _extend(self, op: Op, tokens: list[int]) -> None:
        start = len(self._tape)
        self._tape.extend(tokens)
        self._put(
            op,
            _tokens=tokens,
            start=start,
            stop=start + len(tokens),
            n_tokens=len(tokens),
            cache_start=self.state.next_cache_position,
        )

    def _put(self, op: Op, *, _tokens: list[int] | None = None, **fields: Any) -> None:
        generation = self.state.generation + (op in (Op.TRUNCATE, Op.RESTORE))
        event = Event(
            run_id=self.run_id,
            session_id=self.session_id,
            seq=len(self.events),
            at_ns=len(self.events),
            op=op,
            turn=self.state.turn,
            generation=generation,
            **fields,
        )
        after = residency.apply(self.state, event)
        event = replace(
            event,
            resident_tokens=after.resident_tokens,
            resident_digest=after.resident.digest(),
            layout_digest=layout_digest(after.layout),
        )
        self.state = after
        self.events.append(event)
        if _tokens is not None:
            self.tokens[event.seq] = TokensRow(
                run_id=self.run_id,
                session_id=self.session_id,
                seq=event.seq,
                start=event.start or 0,
                n_tokens=len(_tokens),
                block_tokens=32,
                hashes=json.dumps([]),
                mac="",
                tokens=tuple(_tokens),
            )
