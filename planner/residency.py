"""The residency fold: `apply(state, event) -> state`, the only source of what kvtape says about residency.

The fold is pure and strict: an event that is illegal in a state raises `IllegalEvent` and nothing is repaired.
`check_event` compares what an event recorded about the state with what the fold says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvtape.planner import layout as lay
from kvtape.planner.events import BlockRef, Event, Op, Placement, Way
from kvtape.planner.layout import Layout
from kvtape.planner.ranges import RangeSet

__all__ = [
    "RESIDENCY_OPS",
    "ColdBlock",
    "IllegalEvent",
    "ResidencyMismatch",
    "ResidencyState",
    "apply",
    "check_event",
    "fold",
]


RESIDENCY_OPS = frozenset({Op.TRUNCATE, Op.PREFILL, Op.DECODE, Op.EVICT, Op.ADMIT, Op.SHIFT, Op.RECOMPUTE, Op.RESTORE})
"""The events that change the resident set or its positions."""


class IllegalEvent(ValueError):
    """The event cannot happen in this state; names session, seq, op and what is wrong."""

    def __init__(self, event: Event, why: str) -> None:
        super().__init__(f"session {event.session_id} seq {event.seq} ({event.op}): {why}")
        self.event = event
        self.why = why


class ResidencyMismatch(ValueError):
    """The event recorded another residency than the fold of the log gives."""

    def __init__(self, event: Event, what: str, recorded: int, folded: int) -> None:
        super().__init__(
            f"session {event.session_id} seq {event.seq} ({event.op}): {what} recorded {recorded}, fold gives {folded}"
        )
        self.event = event
        self.what = what
        self.recorded = recorded
        self.folded = folded


@dataclass(frozen=True, slots=True)
class ColdBlock:
    """A block in the cold store: its tape range and the cache position its first row had when it left."""

    block_id: int
    start: int
    stop: int
    cache_start: int


@dataclass(frozen=True, slots=True)
class _Saved:
    tape_length: int
    prefix_length: int
    layout: Layout
    cold: tuple[ColdBlock, ...]


@dataclass(frozen=True, slots=True)
class ResidencyState:
    """What is resident, cold and gone after some prefix of a session's events. All lengths in tokens."""

    next_seq: int = 0
    turn: int = 0
    tape_length: int = 0
    generation: int = 0
    prefix_length: int = 0
    n_ctx: int = 0
    layout: Layout = ()
    cold: tuple[ColdBlock, ...] = ()
    snapshots: tuple[tuple[int, _Saved], ...] = field(default=(), repr=False)
    opened: bool = False
    closed: bool = False
    lost: bool = False
    fatal: str | None = None

    @property
    def resident(self) -> RangeSet:
        return lay.resident_ranges(self.layout)

    @property
    def resident_tokens(self) -> int:
        return sum(s.length for s in self.layout)

    @property
    def cold_ranges(self) -> RangeSet:
        return RangeSet((b.start, b.stop) for b in self.cold)

    @property
    def dropped(self) -> RangeSet:
        """Tape positions that are neither resident nor cold: only the tape still knows them."""
        return RangeSet([(0, self.tape_length)]) - self.resident - self.cold_ranges

    @property
    def next_cache_position(self) -> int:
        return lay.next_cache_position(self.layout)

    def cold_block(self, block_id: int) -> ColdBlock | None:
        return next((b for b in self.cold if b.block_id == block_id), None)

    def snapshot_ids(self) -> tuple[int, ...]:
        return tuple(i for i, _ in self.snapshots)


def apply(state: ResidencyState, event: Event) -> ResidencyState:
    """The state after `event`. Raises IllegalEvent; never looks at the recorded digests (see `check_event`)."""
    _require(event, event.seq == state.next_seq, f"expected seq {state.next_seq}")
    _require(event, not state.closed, "the session is closed")
    _require(event, not state.lost, "events were lost before this one; the session cannot be folded further")
    _require(event, state.opened == (event.op != Op.OPEN), "a session opens once, with its first event")
    if state.fatal is not None:
        _require(event, event.op in (Op.REFUSE, Op.CLOSE), f"the session is poisoned ({state.fatal})")
    moves_generation = event.op in (Op.TRUNCATE, Op.RESTORE)
    expected_generation = state.generation + (1 if moves_generation else 0)
    _require(event, event.generation == expected_generation, f"expected generation {expected_generation}")
    try:
        after = _HANDLERS[event.op](state, event)
    except ValueError as err:
        raise err if isinstance(err, IllegalEvent) else IllegalEvent(event, str(err)) from None
    after = replace(after, next_seq=state.next_seq + 1)
    _require(event, event.turn == after.turn, f"expected turn {after.turn}")
    _require(
        event,
        after.resident_tokens <= after.n_ctx,
        f"{after.resident_tokens} tokens resident in a context of {after.n_ctx}",
    )
    return after


def check_event(after: ResidencyState, event: Event) -> None:
    """Compare what `event` recorded with the folded state after it. Raises ResidencyMismatch."""
    pairs = (
        ("resident_tokens", event.resident_tokens, after.resident_tokens),
        ("resident_digest", event.resident_digest, after.resident.digest()),
        ("layout_digest", event.layout_digest, lay.layout_digest(after.layout)),
    )
    for what, recorded, folded in pairs:
        if recorded is not None and recorded != folded:
            raise ResidencyMismatch(event, what, recorded, folded)


def fold(events: Iterable[Event], state: ResidencyState | None = None) -> ResidencyState:
    """`apply` and `check_event` over `events` in order."""
    current = state or ResidencyState()
    for event in events:
        current = apply(current, event)
        check_event(current, event)
    return current


def _require(event: Event, ok: bool, why: str) -> None:
    if not ok:
        raise IllegalEvent(event, why)


def _span(event: Event) -> tuple[int, int]:
    """start, stop of an event that must have a non-empty range whose length is `n_tokens`."""
    if event.start is None or event.stop is None or not event.start < event.stop:
        raise IllegalEvent(event, f"needs a non-empty range, has [{event.start}, {event.stop})")
    if event.n_tokens is not None and event.n_tokens != event.stop - event.start:
        raise IllegalEvent(event, f"n_tokens {event.n_tokens} is not the length of [{event.start}, {event.stop})")
    return event.start, event.stop


def _cache_start(event: Event) -> int:
    if event.cache_start is None:
        raise IllegalEvent(event, "needs cache_start")
    return event.cache_start


def _open(state: ResidencyState, event: Event) -> ResidencyState:
    if not event.n_tokens:
        raise IllegalEvent(event, "needs the effective context in n_tokens")
    return replace(state, opened=True, n_ctx=event.n_tokens)


def _prompt(state: ResidencyState, event: Event) -> ResidencyState:
    """A prefix prompt names the common prefix in `start`; a suffix (reason `suffix`) starts at the tape's end."""
    if event.start is None or event.n_tokens is None:
        raise IllegalEvent(event, "needs start and n_tokens")
    _require(event, event.start <= state.tape_length, f"start {event.start} is past the tape ({state.tape_length})")
    if event.reason == "suffix":
        _require(event, event.start == state.tape_length, "a suffix starts at the end of the tape")
        return state
    _require(event, event.start <= event.n_tokens, "the common prefix is longer than the prompt")
    return replace(state, turn=state.turn + 1, prefix_length=event.n_tokens)


def _unchanged(state: ResidencyState, event: Event) -> ResidencyState:
    return state


def _truncate(state: ResidencyState, event: Event) -> ResidencyState:
    if event.start is None:
        raise IllegalEvent(event, "needs the cut in start")
    _require(event, 0 <= event.start <= state.tape_length, f"cut {event.start} is off the tape ({state.tape_length})")
    kept = lay.cut(state.layout, event.start)
    if event.way == Way.RECOMPUTE:
        kept = lay.rank_layout(lay.resident_ranges(kept))
    return replace(
        state,
        tape_length=event.start,
        generation=state.generation + 1,
        layout=kept,
        cold=tuple(b for b in state.cold if b.stop <= event.start),
    )


def _extend(state: ResidencyState, event: Event) -> ResidencyState:
    """prefill and decode put tokens on the tape's end and in the cache behind the last row."""
    start, stop = _span(event)
    _require(event, start == state.tape_length, f"starts at {start}, the tape ends at {state.tape_length}")
    at = _cache_start(event)
    _require(event, at == state.next_cache_position, f"cache_start {at}, expected {state.next_cache_position}")
    return replace(state, tape_length=stop, layout=lay.append(state.layout, start, stop - start, at))


def _evict(state: ResidencyState, event: Event) -> ResidencyState:
    start, stop = _span(event)
    if event.way is None:
        raise IllegalEvent(event, "needs a way")
    home = next((s for s in state.layout if s.tape_start <= start and stop <= s.tape_stop), None)
    if home is None:
        raise IllegalEvent(event, f"[{start}, {stop}) is not one resident run")
    at = home.cache_start + start - home.tape_start
    _require(event, event.cache_start in (None, at), f"cache_start {event.cache_start}, the rows are at {at}")
    left = lay.remove(state.layout, start, stop)
    if event.way == Way.RECOMPUTE:
        left = lay.rank_layout(lay.resident_ranges(left))
    cold = state.cold
    if event.cold:
        cold = (*cold, *_cold_blocks(state, event, start, stop, at))
    return replace(state, layout=left, cold=tuple(sorted(cold, key=lambda b: (b.start, b.block_id))))


def _cold_blocks(state: ResidencyState, event: Event, start: int, stop: int, at: int) -> list[ColdBlock]:
    refs: tuple[BlockRef, ...] = event.blocks or ()
    covered = RangeSet((r.start, r.stop) for r in refs)
    _require(event, all(r.start < r.stop for r in refs), "one of its blocks is empty")
    _require(event, sum(r.stop - r.start for r in refs) == covered.n_tokens, "its blocks overlap")
    _require(event, len({r.block_id for r in refs}) == len(refs), "two of its blocks have one id")
    _require(event, covered.issubset(RangeSet([(start, stop)])), "a block reaches outside the range")
    for ref in refs:
        _require(event, state.cold_block(ref.block_id) is None, f"block {ref.block_id} is already cold")
    return [ColdBlock(r.block_id, r.start, r.stop, at + r.start - start) for r in refs]


def _shift(state: ResidencyState, event: Event) -> ResidencyState:
    if event.start is None or event.stop is None or not event.delta:
        raise IllegalEvent(event, "needs a cache range and a delta other than 0")
    moved = sum(max(0, min(s.cache_stop, event.stop) - max(s.cache_start, event.start)) for s in state.layout)
    _require(event, moved > 0, "moves no resident row")
    _require(event, event.n_tokens in (None, moved), f"n_tokens {event.n_tokens}, {moved} rows move")
    after = lay.shift(state.layout, event.start, event.stop, event.delta)
    _require(event, _row_order(after) == _row_order(state.layout), "rows change their order")
    return replace(state, layout=after)


def _row_order(layout: Layout) -> list[list[int]]:
    """The tape runs in cache order, whatever the cache holes between them: two layouts with one row order agree."""
    runs: list[list[int]] = []
    for s in layout:
        if runs and runs[-1][1] == s.tape_start:
            runs[-1][1] = s.tape_stop
        else:
            runs.append([s.tape_start, s.tape_stop])
    return runs


def _put_back(state: ResidencyState, event: Event, start: int, stop: int) -> Layout:
    _require(event, stop <= state.tape_length, f"[{start}, {stop}) is past the tape ({state.tape_length})")
    at = _cache_start(event)
    if event.placement == Placement.APPEND:
        _require(event, at == state.next_cache_position, f"cache_start {at}, expected {state.next_cache_position}")
    else:
        before = [s for s in state.layout if s.cache_stop <= at]
        behind = [s for s in state.layout if s.cache_start >= at]
        after_left = bool(before) and before[-1].tape_start < start
        before_right = bool(behind) and behind[0].tape_start > start
        alone = not before and not behind
        _require(event, alone or after_left or before_right, "in_place, but neither neighbour is in tape order")
    return lay.append(state.layout, start, stop - start, at)


def _admit(state: ResidencyState, event: Event) -> ResidencyState:
    block = None if event.block_id is None else state.cold_block(event.block_id)
    if block is None:
        raise IllegalEvent(event, f"block {event.block_id} is not cold")
    if event.placement is None:
        raise IllegalEvent(event, "needs a placement")
    start, stop = _span(event)
    _require(event, (start, stop) == (block.start, block.stop), f"block {block.block_id} is another range")
    return replace(
        state,
        layout=_put_back(state, event, start, stop),
        cold=tuple(b for b in state.cold if b.block_id != block.block_id),
    )


def _recompute(state: ResidencyState, event: Event) -> ResidencyState:
    start, stop = _span(event)
    _require(event, not RangeSet([(start, stop)]) & state.cold_ranges, "part of it is cold: admit that instead")
    return replace(state, layout=_put_back(state, event, start, stop))


def _trim(state: ResidencyState, event: Event) -> ResidencyState:
    if event.block_id is None or state.cold_block(event.block_id) is None:
        raise IllegalEvent(event, f"block {event.block_id} is not cold")
    return replace(state, cold=tuple(b for b in state.cold if b.block_id != event.block_id))


def _snapshot(state: ResidencyState, event: Event) -> ResidencyState:
    if event.snapshot_id is None or event.snapshot_id in state.snapshot_ids():
        raise IllegalEvent(event, f"needs a snapshot_id of its own, has {event.snapshot_id}")
    saved = _Saved(state.tape_length, state.prefix_length, state.layout, state.cold)
    return replace(state, snapshots=(*state.snapshots, (event.snapshot_id, saved)))


def _restore(state: ResidencyState, event: Event) -> ResidencyState:
    saved = next((s for i, s in state.snapshots if i == event.snapshot_id), None)
    if saved is None:
        raise IllegalEvent(event, f"snapshot {event.snapshot_id} was never taken")
    # A blob that was admitted and evicted again lies where it last stood, so the entries are today's.
    held = {b.block_id for b in saved.cold}
    return replace(
        state,
        tape_length=saved.tape_length,
        prefix_length=saved.prefix_length,
        layout=saved.layout,
        cold=tuple(b for b in state.cold if b.block_id in held),
        generation=state.generation + 1,
    )


def _lost(state: ResidencyState, event: Event) -> ResidencyState:
    return replace(state, lost=True)


def _fatal(state: ResidencyState, event: Event) -> ResidencyState:
    if not event.error_class:
        raise IllegalEvent(event, "needs its class in error_class")
    return replace(state, fatal=event.error_class)


def _close(state: ResidencyState, event: Event) -> ResidencyState:
    return replace(state, closed=True)


_HANDLERS = {
    Op.OPEN: _open,
    Op.PROMPT: _prompt,
    Op.GENERATE: _unchanged,
    Op.TRUNCATE: _truncate,
    Op.CLOSE: _close,
    Op.SCORE: _unchanged,
    Op.PLAN: _unchanged,
    Op.PREFILL: _extend,
    Op.DECODE: _extend,
    Op.EVICT: _evict,
    Op.ADMIT: _admit,
    Op.SHIFT: _shift,
    Op.RECOMPUTE: _recompute,
    Op.TRIM: _trim,
    Op.SNAPSHOT: _snapshot,
    Op.RESTORE: _restore,
    Op.REFUSE: _unchanged,
    Op.LOST: _lost,
    Op.FATAL: _fatal,
}
