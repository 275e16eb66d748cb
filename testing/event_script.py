"""Legal sessions made step by step: each step is one event that the fold has taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvtape.planner import layout as lay
from kvtape.planner.events import BlockRef, Event, Op, Placement, Way
from kvtape.planner.layout import layout_digest
from kvtape.planner.residency import ResidencyState, apply

__all__ = ["EventScript"]


class EventScript:
    """One session's events so far, and the state they fold to. Two numbers choose the details of a step."""

    def __init__(self, n_ctx: int, *, run_id: str = "run", session_id: str = "session") -> None:
        self.events: list[Event] = []
        self.state = ResidencyState()
        self._ids = run_id, session_id
        self._next_block = 0
        self.put(Op.OPEN, n_tokens=n_ctx)

    def put(self, op: Op, **fields: Any) -> None:
        """Add an event. Raises IllegalEvent where the fold does not take it."""
        moves = op in (Op.TRUNCATE, Op.RESTORE)
        event = Event(
            run_id=self._ids[0],
            session_id=self._ids[1],
            seq=len(self.events),
            at_ns=len(self.events),
            op=op,
            turn=self.state.turn + (op is Op.PROMPT and fields.get("reason") != "suffix"),
            generation=self.state.generation + moves,
            **fields,
        )
        after = apply(self.state, event)
        self.state = after
        self.events.append(
            replace(
                event,
                resident_tokens=after.resident_tokens,
                resident_digest=after.resident.digest(),
                layout_digest=layout_digest(after.layout),
            )
        )

    def possible(self) -> list[str]:
        """The steps that can be taken now, in a fixed order."""
        s = self.state
        room = s.n_ctx > s.resident_tokens
        can = {
            "prefill": room,
            "decode": room and bool(s.tape_length),
            "prompt": True,
            "evict": bool(s.layout),
            "evict_cold": bool(s.layout),
            "shift": bool(s.layout),
            "admit": any(b.stop - b.start + s.resident_tokens <= s.n_ctx for b in s.cold),
            "recompute": room and bool(s.dropped),
            "trim": bool(s.cold),
            "truncate": bool(s.tape_length),
            "snapshot": len(s.snapshots) < 3,
            "restore": bool(s.snapshots),
            "plan": True,
            "refuse": True,
        }
        return [name for name, possible in can.items() if possible]

    def step(self, name: str, a: int, b: int) -> None:
        """Take one of the `possible` steps; `a` and `b`, any numbers from 0 on, choose among its forms."""
        _STEPS[name](self, a, b)

    def end(self, how: str) -> None:
        """`open` leaves the session as it is; `close`, `fatal` (and close) or `lost` end it."""
        if how == "fatal":
            self.put(Op.FATAL, error_class="decode_failed", reason="planted")
        if how in ("close", "fatal"):
            self.put(Op.CLOSE)
        elif how == "lost":
            self.put(Op.LOST, n_tokens=1)

    # -- steps ----------------------------------------------------------------------------------------------------

    def _extend(self, op: Op, a: int) -> None:
        s = self.state
        n = 1 + a % min(s.n_ctx - s.resident_tokens, 12)
        self.put(op, start=s.tape_length, stop=s.tape_length + n, n_tokens=n, cache_start=s.next_cache_position)

    def _prompt(self, a: int, b: int) -> None:
        start = a % (self.state.tape_length + 1)
        self.put(Op.PROMPT, start=start, n_tokens=start + b % 9)

    def _evict(self, a: int, b: int, cold: bool) -> None:
        home = self.state.layout[a % len(self.state.layout)]
        start = home.tape_start + b % home.length
        stop = start + 1 + (a + b) % (home.tape_stop - start)
        way = (Way.GAP, Way.REBASED, Way.RECOMPUTE)[a % 3]
        blocks = (BlockRef(self._next_block, start, stop),) if cold else None
        self._next_block += cold
        at = home.cache_start + start - home.tape_start
        self.put(
            Op.EVICT,
            start=start,
            stop=stop,
            n_tokens=stop - start,
            cache_start=at,
            way=way,
            cold=cold,
            blocks=blocks,
        )
        end = self.state.next_cache_position
        if way is Way.REBASED and end > at:
            self.put(Op.SHIFT, start=at + stop - start, stop=end, delta=start - stop, way=way)

    def _shift(self, a: int, b: int) -> None:
        """All rows up, or down where there is room below them."""
        first, end = self.state.layout[0].cache_start, self.state.next_cache_position
        delta = -(1 + b % first) if first and a % 2 else 1 + b % 5
        self.put(Op.SHIFT, start=first, stop=end, delta=delta, way=Way.REBASED)

    def _admit(self, a: int, b: int) -> None:
        s = self.state
        fitting = [c for c in s.cold if c.stop - c.start + s.resident_tokens <= s.n_ctx]
        block = fitting[a % len(fitting)]
        self._put_back(Op.ADMIT, block.start, block.stop, b, block_id=block.block_id, way=Way.IMPORT)

    def _recompute(self, a: int, b: int) -> None:
        s = self.state
        hole = s.dropped.ranges[a % len(s.dropped.ranges)]
        stop = min(hole.stop, hole.start + s.n_ctx - s.resident_tokens, hole.start + 1 + b % 9)
        self._put_back(Op.RECOMPUTE, hole.start, stop, b, way=Way.RECOMPUTE)

    def _put_back(self, op: Op, start: int, stop: int, b: int, **fields: Any) -> None:
        """Behind the last row, or in place, where a shift makes room first if it must."""
        at, placement = self.state.next_cache_position, Placement.APPEND
        if b % 2:
            place = lay.find_place(self.state.layout, start, stop)
            at, placement = place.cache_start, Placement.IN_PLACE
            if place.delta:
                self.put(Op.SHIFT, start=place.shift_from, stop=place.shift_stop, delta=place.delta, way=Way.REBASED)
        self.put(op, start=start, stop=stop, n_tokens=stop - start, cache_start=at, placement=placement, **fields)

    def _trim(self, a: int, b: int) -> None:
        self.put(Op.TRIM, block_id=self.state.cold[a % len(self.state.cold)].block_id)

    def _truncate(self, a: int, b: int) -> None:
        cut = a % (self.state.tape_length + 1)
        self.put(Op.TRUNCATE, start=cut, stop=self.state.tape_length, way=Way.RECOMPUTE if b % 4 == 0 else None)

    def _snapshot(self, a: int, b: int) -> None:
        self.put(Op.SNAPSHOT, snapshot_id=len(self.state.snapshots))

    def _restore(self, a: int, b: int) -> None:
        self.put(Op.RESTORE, snapshot_id=a % len(self.state.snapshots), way=Way.IMPORT)


_STEPS: dict[str, Callable[[EventScript, int, int], None]] = {
    "prefill": lambda s, a, b: s._extend(Op.PREFILL, a),
    "decode": lambda s, a, b: s._extend(Op.DECODE, a),
    "prompt": EventScript._prompt,
    "evict": lambda s, a, b: s._evict(a, b, cold=False),
    "evict_cold": lambda s, a, b: s._evict(a, b, cold=True),
    "shift": EventScript._shift,
    "admit": EventScript._admit,
    "recompute": EventScript._recompute,
    "trim": EventScript._trim,
    "truncate": EventScript._truncate,
    "snapshot": EventScript._snapshot,
    "restore": EventScript._restore,
    "plan": lambda s, a, b: s.put(Op.PLAN, n_tokens=a),
    "refuse": lambda s, a, b: s.put(Op.REFUSE, error_class="ContextOverflow"),
}
