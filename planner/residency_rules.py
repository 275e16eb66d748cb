"""One rule per op: how its event changes the residency state, and what makes it illegal there.

`residency.apply` folds one event by this table, `fold_columns` many at once by the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from kvtape.planner import layout as lay
from kvtape.planner.events import BlockRef, Event, Op, Placement, Way
from kvtape.planner.layout import Layout
from kvtape.planner.ranges import RangeSet
from kvtape.planner.residency_state import UNBOUNDED, ColdBlock, ResidencyState, SavedState, changed

__all__ = ["RULES", "Effect", "IllegalEvent", "Rule", "extend", "require"]


class IllegalEvent(ValueError):
    """The event cannot happen in this state; names session, seq, op and what is wrong."""

    def __init__(self, event: Event, why: str) -> None:
        super().__init__(f"session {event.session_id} seq {event.seq} ({event.op}): {why}")
        self.event = event
        self.why = why


def require(event: Event, ok: bool, why: str) -> None:
    """Raises IllegalEvent unless `ok`."""
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
    """An imported session whose source says nothing of its context has none in `n_tokens`: it is not bounded."""
    require(event, event.n_tokens != 0, "a context of 0 tokens")
    return changed(state, opened=True, n_ctx=UNBOUNDED if event.n_tokens is None else event.n_tokens)


def _prompt(state: ResidencyState, event: Event) -> ResidencyState:
    """A prefix prompt names the common prefix in `start`; a suffix (reason `suffix`) starts at the tape's end, or at
    that of the prompt before it, which waits to be computed."""
    if event.start is None or event.n_tokens is None:
        raise IllegalEvent(event, "needs start and n_tokens")
    suffix = event.reason == "suffix"
    end = max(state.tape_length, state.offered) if suffix else state.tape_length
    require(event, event.start <= end, f"start {event.start} is past the tape ({end})")
    if suffix:
        require(event, event.start in (state.tape_length, end), "a suffix starts at the end of the tape")
        return changed(state, offered=event.start + event.n_tokens)
    require(event, event.start <= event.n_tokens, "the common prefix is longer than the prompt")
    return changed(state, turn=state.turn + 1, prefix_length=event.n_tokens, offered=event.n_tokens)


def _unchanged(state: ResidencyState, event: Event) -> ResidencyState:
    return state


def _truncate(state: ResidencyState, event: Event) -> ResidencyState:
    if event.start is None:
        raise IllegalEvent(event, "needs the cut in start")
    require(event, 0 <= event.start <= state.tape_length, f"cut {event.start} is off the tape ({state.tape_length})")
    kept = lay.cut(state.layout, event.start)
    if event.way == Way.RECOMPUTE:
        kept = lay.rank_layout(lay.resident_ranges(kept))
    return changed(
        state,
        tape_length=event.start,
        generation=state.generation + 1,
        layout=kept,
        cold=tuple(b for b in state.cold if b.stop <= event.start),
    )


def extend(state: ResidencyState, start: int, stop: int, cache_start: int) -> ResidencyState:
    """With tokens `[start, stop)` on the tape's end and in the cache behind the last row. ValueError elsewhere."""
    if start != state.tape_length:
        raise ValueError(f"starts at {start}, the tape ends at {state.tape_length}")
    if cache_start != state.next_cache_position:
        raise ValueError(f"cache_start {cache_start}, expected {state.next_cache_position}")
    return changed(state, tape_length=stop, layout=lay.append(state.layout, start, stop - start, cache_start))


def _extend(state: ResidencyState, event: Event) -> ResidencyState:
    start, stop = _span(event)
    return extend(state, start, stop, _cache_start(event))


def _evict(state: ResidencyState, event: Event) -> ResidencyState:
    start, stop = _span(event)
    if event.way is None:
        raise IllegalEvent(event, "needs a way")
    at = lay.run_start(state.layout, start, stop)
    if at is None:
        raise IllegalEvent(event, f"[{start}, {stop}) is not one resident run")
    require(event, event.cache_start in (None, at), f"cache_start {event.cache_start}, the rows are at {at}")
    left = lay.remove(state.layout, start, stop)
    if event.way == Way.RECOMPUTE:
        left = lay.rank_layout(lay.resident_ranges(left))
    cold = state.cold
    if event.cold:
        cold = (*cold, *_cold_blocks(state, event, start, stop, at))
    return changed(state, layout=left, cold=tuple(sorted(cold, key=lambda b: (b.start, b.block_id))))


def _cold_blocks(state: ResidencyState, event: Event, start: int, stop: int, at: int) -> list[ColdBlock]:
    refs: tuple[BlockRef, ...] = event.blocks or ()
    covered = RangeSet((r.start, r.stop) for r in refs)
    require(event, all(r.start < r.stop for r in refs), "one of its blocks is empty")
    require(event, sum(r.stop - r.start for r in refs) == covered.n_tokens, "its blocks overlap")
    require(event, len({r.block_id for r in refs}) == len(refs), "two of its blocks have one id")
    require(event, covered.issubset(RangeSet([(start, stop)])), "a block reaches outside the range")
    for ref in refs:
        require(event, state.cold_block(ref.block_id) is None, f"block {ref.block_id} is already cold")
    return [ColdBlock(r.block_id, r.start, r.stop, at + r.start - start) for r in refs]


def _shift(state: ResidencyState, event: Event) -> ResidencyState:
    if event.start is None or event.stop is None or not event.delta:
        raise IllegalEvent(event, "needs a cache range and a delta other than 0")
    moved = lay.rows_between(state.layout, event.start, event.stop)
    require(event, moved > 0, "moves no resident row")
    require(event, event.n_tokens in (None, moved), f"n_tokens {event.n_tokens}, {moved} rows move")
    after = lay.shift(state.layout, event.start, event.stop, event.delta)
    require(event, _row_order(after) == _row_order(state.layout), "rows change their order")
    return changed(state, layout=after)


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
    require(event, stop <= state.tape_length, f"[{start}, {stop}) is past the tape ({state.tape_length})")
    at = _cache_start(event)
    if event.placement == Placement.APPEND:
        require(event, at == state.next_cache_position, f"cache_start {at}, expected {state.next_cache_position}")
    else:
        before = [s for s in state.layout if s.cache_stop <= at]
        behind = [s for s in state.layout if s.cache_start >= at]
        after_left = bool(before) and before[-1].tape_start < start
        before_right = bool(behind) and behind[0].tape_start > start
        alone = not before and not behind
        require(event, alone or after_left or before_right, "in_place, but neither neighbour is in tape order")
    return lay.append(state.layout, start, stop - start, at)


def _admit(state: ResidencyState, event: Event) -> ResidencyState:
    block = None if event.block_id is None else state.cold_block(event.block_id)
    if block is None:
        raise IllegalEvent(event, f"block {event.block_id} is not cold")
    if event.placement is None:
        raise IllegalEvent(event, "needs a placement")
    start, stop = _span(event)
    require(event, (start, stop) == (block.start, block.stop), f"block {block.block_id} is another range")
    return changed(
        state,
        layout=_put_back(state, event, start, stop),
        cold=tuple(b for b in state.cold if b.block_id != block.block_id),
    )


def _recompute(state: ResidencyState, event: Event) -> ResidencyState:
    start, stop = _span(event)
    require(event, not RangeSet([(start, stop)]) & state.cold_ranges, "part of it is cold: admit that instead")
    return changed(state, layout=_put_back(state, event, start, stop))


def _trim(state: ResidencyState, event: Event) -> ResidencyState:
    if event.block_id is None or state.cold_block(event.block_id) is None:
        raise IllegalEvent(event, f"block {event.block_id} is not cold")
    return changed(state, cold=tuple(b for b in state.cold if b.block_id != event.block_id))


def _snapshot(state: ResidencyState, event: Event) -> ResidencyState:
    if event.snapshot_id is None or event.snapshot_id in state.snapshot_ids():
        raise IllegalEvent(event, f"needs a snapshot_id of its own, has {event.snapshot_id}")
    saved = SavedState(state.tape_length, state.prefix_length, state.layout, state.cold)
    return changed(state, snapshots=(*state.snapshots, (event.snapshot_id, saved)))


def _restore(state: ResidencyState, event: Event) -> ResidencyState:
    saved = next((s for i, s in state.snapshots if i == event.snapshot_id), None)
    if saved is None:
        raise IllegalEvent(event, f"snapshot {event.snapshot_id} was never taken")
    # A blob that was admitted and evicted again lies where it last stood, so the entries are today's.
    held = {b.block_id for b in saved.cold}
    return changed(
        state,
        tape_length=saved.tape_length,
        prefix_length=saved.prefix_length,
        offered=saved.tape_length,
        layout=saved.layout,
        cold=tuple(b for b in state.cold if b.block_id in held),
        generation=state.generation + 1,
    )


def _lost(state: ResidencyState, event: Event) -> ResidencyState:
    return changed(state, lost=True)


def _fatal(state: ResidencyState, event: Event) -> ResidencyState:
    if not event.error_class:
        raise IllegalEvent(event, "needs its class in error_class")
    return changed(state, fatal=event.error_class)


def _close(state: ResidencyState, event: Event) -> ResidencyState:
    return changed(state, closed=True)


class Effect(Enum):
    """What a rule does to a state, as far as many events can be folded as one.

    STILL: nothing. EXTEND: `extend` by the event's range, so events that join up are one. PROMPT: a turn begins, and
    the last one's prefix length stands. EVICT: `layout.remove`, and SHIFT: `layout.shift`, of the event's range; many
    that slide along the last rows of the cache are one of each. OTHER: what its step does.
    """

    STILL = "still"
    EXTEND = "extend"
    PROMPT = "prompt"
    EVICT = "evict"
    SHIFT = "shift"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Rule:
    """How one op changes a state. `step` may raise ValueError; `apply` checks what holds for every op."""

    step: Callable[[ResidencyState, Event], ResidencyState]
    effect: Effect = Effect.OTHER


RULES: Mapping[Op, Rule] = MappingProxyType(
    {
        Op.OPEN: Rule(_open),
        Op.PROMPT: Rule(_prompt, Effect.PROMPT),
        Op.GENERATE: Rule(_unchanged, Effect.STILL),
        Op.TRUNCATE: Rule(_truncate),
        Op.CLOSE: Rule(_close),
        Op.SCORE: Rule(_unchanged, Effect.STILL),
        Op.PLAN: Rule(_unchanged, Effect.STILL),
        Op.PREFILL: Rule(_extend, Effect.EXTEND),
        Op.DECODE: Rule(_extend, Effect.EXTEND),
        Op.EVICT: Rule(_evict, Effect.EVICT),
        Op.ADMIT: Rule(_admit),
        Op.SHIFT: Rule(_shift, Effect.SHIFT),
        Op.RECOMPUTE: Rule(_recompute),
        Op.TRIM: Rule(_trim),
        Op.SNAPSHOT: Rule(_snapshot),
        Op.RESTORE: Rule(_restore),
        Op.REFUSE: Rule(_unchanged, Effect.STILL),
        Op.LOST: Rule(_lost),
        Op.FATAL: Rule(_fatal),
    }
)
"""The one table that `apply` and `fold_columns` both read."""
