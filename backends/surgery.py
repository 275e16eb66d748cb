"""The steps that change residency: each is one engine call (or a rebuild) and the event that says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtape.backends import carried, cold_steps
from kvtape.backends.errors import ContextOverflow, UnknownBlock, UnsupportedOperation
from kvtape.backends.parts import Parts
from kvtape.planner import layout as lay
from kvtape.planner.blocks import Block
from kvtape.planner.events import BlockRef, Op, Placement, Way
from kvtape.planner.layout import Place
from kvtape.planner.ranges import RangeSet

__all__ = ["admit", "choose_way", "compact", "evict", "refill", "truncate"]


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows to evict, contiguous in tape and cache."""

    start: int
    stop: int
    cache_start: int


def choose_way(parts: Parts) -> Way | None:
    """How an evict would be carried out here, the cheapest way first; None when there is no way."""
    return next(iter(parts.ways), None)


def truncate(parts: Parts, tape_stop: int, reason: str) -> int:
    """Cut the tape at `tape_stop`, by a rebuild where the rows cannot be taken out.

    Returns how many resident tokens were given up.
    """
    began = parts.now()
    before = parts.state.resident_tokens
    kept = parts.state.resident - RangeSet([(tape_stop, max(tape_stop, parts.state.tape_length))])
    way, calls, computed = None, None, None
    if before != kept.n_tokens and not _cut_rows(parts, tape_stop):
        result = parts.backend.rebuild(kept, parts.tokens_of(kept))
        way, calls, computed = Way.RECOMPUTE, result.calls, result.tokens
    removed = len(parts.tape) - tape_stop
    del parts.tape[tape_stop:]
    parts.shortest = min(parts.shortest, tape_stop)
    parts.history, parts.probed = parts.history.truncate(tape_stop), None
    carried.cut(parts, tape_stop)
    shorter = parts.catalog.truncate(tape_stop)
    parts.journal.emit(
        Op.TRUNCATE,
        began,
        block_rows=parts.journal.block_rows(shorter, truncated=True),
        start=tape_stop,
        stop=tape_stop + removed,
        n_tokens=removed,
        way=way,
        physical_prefill_calls=calls,
        physical_prefill_tokens=computed,
        recomputed_tokens=computed,
        reason=reason,
        elapsed_ns=parts.now() - began,
        kv_bytes=parts.resident_bytes(),
    )
    cold_steps.forget_invalid(parts)
    return before - kept.n_tokens


def _cut_rows(parts: Parts, tape_stop: int) -> bool:
    """Take the rows at or past `tape_stop` out of the cache; False, and nothing changed, where that is not possible."""
    layout, can = parts.state.layout, parts.capabilities
    kept_end = lay.next_cache_position(lay.cut(layout, tape_stop))
    firsts = [s.cache_start + max(0, tape_stop - s.tape_start) for s in layout if s.tape_stop > tape_stop]
    needs_tail, needs_middle = max(firsts) >= kept_end, min(firsts) < kept_end
    if (needs_tail and not can.remove_tail) or (needs_middle and not can.remove_middle):
        return False
    try:
        parts.backend.truncate(tape_stop)
    except UnsupportedOperation:
        # A windowed cache knows only now that it has overwritten rows that would be seen again.
        return False
    return True


def evict(parts: Parts, ranges: Iterable[tuple[int, int]], way: Way, reason: str) -> None:
    """Evict tape ranges, all resident, the latest first, so that earlier positions stay valid meanwhile."""
    wanted = RangeSet(ranges)
    # At the borders of the runs, so that a block that stands in two places of the cache is cut there too.
    fragments = parts.catalog.split((run.start, run.stop) for run in _runs(parts, wanted))
    # Before any row moves, so that no shift is pending; but a rebuild computes the later runs' rows anew, and a block
    # must hold the rows that were there when it was evicted.
    exported = {} if way is Way.RECOMPUTE else cold_steps.export(parts, wanted)
    while wanted:
        # Looked up anew each time: a rebuild lays all survivors together.
        run = _runs(parts, wanted)[0]
        here = RangeSet([(run.start, run.stop)])
        if way is Way.RECOMPUTE:
            exported = cold_steps.export(parts, here)
        _execute(parts, run, way, reason, exported, fragments)
        wanted -= here
        fragments = []


def _runs(parts: Parts, wanted: RangeSet) -> list[_Run]:
    """The runs of `wanted`, latest in the tape first."""
    if not wanted.issubset(parts.state.resident):
        raise UnknownBlock(f"{wanted - parts.state.resident} is not resident and cannot be evicted")
    runs = [
        _Run(r.start, r.stop, seg.cache_start + r.start - seg.tape_start)
        for seg in parts.state.layout
        for r in wanted & RangeSet([(seg.tape_start, seg.tape_stop)])
    ]
    return sorted(runs, key=lambda run: run.start, reverse=True)


def _execute(
    parts: Parts,
    run: _Run,
    way: Way,
    reason: str,
    exported: Mapping[int, cold_steps.Exported],
    fragments: Sequence[Block],
) -> None:
    refs = parts.catalog.refs(run.start, run.stop)
    stored = [exported[r.block_id] for r in refs if r.block_id in exported]
    began = parts.now()
    calls, computed = None, None
    if way is Way.RECOMPUTE:
        left = parts.state.resident - RangeSet([(run.start, run.stop)])
        result = parts.backend.rebuild(left, parts.tokens_of(left))
        calls, computed = result.calls, result.tokens
    else:
        parts.backend.evict(run.start, run.stop)
    parts.journal.emit(
        Op.EVICT,
        began,
        block_rows=parts.journal.block_rows(fragments),
        start=run.start,
        stop=run.stop,
        n_tokens=run.stop - run.start,
        cache_start=run.cache_start,
        way=way,
        cold=bool(stored),
        blocks=tuple(BlockRef(x.entry.block_id, x.entry.start, x.entry.stop) for x in stored) or refs,
        reason=reason,
        physical_prefill_calls=calls,
        physical_prefill_tokens=computed,
        recomputed_tokens=computed,
        elapsed_ns=parts.now() - began + sum(x.elapsed_ns for x in stored),
        kv_bytes=parts.resident_bytes(),
    )
    parts.evictions += 1
    parts.catalog.forget_retrieved(run.start, run.stop)
    if stored:
        cold_steps.store(parts, [x.entry for x in stored])
    if way is Way.REBASED:
        tail_stop = parts.state.next_cache_position
        if tail_stop > run.cache_start:
            shift(parts, run.cache_start + run.stop - run.start, tail_stop, run.start - run.stop, reason)


def shift(parts: Parts, cache_start: int, cache_stop: int, delta: int, reason: str) -> None:
    """Move rows to other cache positions."""
    began = parts.now()
    moved = lay.rows_between(parts.state.layout, cache_start, cache_stop)
    parts.backend.shift(cache_start, cache_stop, delta)
    parts.journal.emit(
        Op.SHIFT,
        began,
        start=cache_start,
        stop=cache_stop,
        delta=delta,
        n_tokens=moved,
        way=Way.REBASED,
        reason=reason,
        elapsed_ns=parts.now() - began,
        kv_bytes=parts.resident_bytes(),
    )


def compact(parts: Parts, reason: str) -> int:
    """Close every hole of the cache, lowest first. Returns by how much the next position fell."""
    parts.require("compact", "position_shift")
    before = parts.state.next_cache_position
    while True:
        end, hole = 0, None
        for seg in parts.state.layout:
            if seg.cache_start > end:
                hole = (seg.cache_start, end - seg.cache_start)
                break
            end = seg.cache_stop
        if hole is None:
            return before - parts.state.next_cache_position
        shift(parts, hole[0], parts.state.next_cache_position, hole[1], reason)


def admit(parts: Parts, block_id: int, placement: Placement, reason: str) -> None:
    """Bring a cold block back. Raises UnknownBlock, ContextOverflow, UnsupportedOperation, StateRejected."""
    began = parts.now()
    entry = cold_steps.check(parts, block_id)
    block = parts.state.cold_block(block_id)
    assert block is not None
    n = block.stop - block.start
    _require_room(parts, n)
    if placement is Placement.APPEND:
        at = parts.state.next_cache_position
        _require_positions(parts, at + n)
    else:
        place = lay.find_place(parts.state.layout, block.start, block.stop, block.cache_start)
        at = _open_place(parts, place, n, reason)
    parts.backend.admit(entry.blob, block.start, at)
    parts.journal.emit(
        Op.ADMIT,
        began,
        block_id=block_id,
        start=block.start,
        stop=block.stop,
        n_tokens=n,
        cache_start=at,
        way=Way.IMPORT,
        placement=placement,
        reason=reason,
        elapsed_ns=parts.now() - began,
        kv_bytes=parts.resident_bytes(),
    )
    assert parts.cold is not None
    parts.cold.pop(block_id)
    parts.catalog.touch(block.start, block.stop, parts.state.turn, retrieved=True)


def refill(parts: Parts, start: int, stop: int, reason: str) -> None:
    """Compute an evicted range again, in its own place."""
    began = parts.now()
    _require_room(parts, stop - start)
    parts.require("refill", "recompute_range")
    at = _open_place(parts, lay.find_place(parts.state.layout, start, stop), stop - start, reason)
    tokens = parts.tape[start:stop]
    result = parts.backend.refill(tokens, start, at)
    parts.catalog.split([(start, stop)])
    parts.journal.emit(
        Op.RECOMPUTE,
        began,
        tokens=tokens,
        start=start,
        stop=stop,
        n_tokens=stop - start,
        cache_start=at,
        way=Way.RECOMPUTE,
        placement=Placement.IN_PLACE,
        reason=reason,
        physical_prefill_calls=result.calls,
        physical_prefill_tokens=result.tokens,
        recomputed_tokens=result.tokens,
        elapsed_ns=parts.now() - began,
        kv_bytes=parts.resident_bytes(),
    )


def _require_room(parts: Parts, n_tokens: int) -> None:
    if n_tokens > parts.free_rows:
        raise ContextOverflow(parts.state.resident_tokens + n_tokens, parts.n_ctx, "evict something first")


def _require_positions(parts: Parts, cache_stop: int) -> None:
    """The engine computes past the trained context, the model was not made for it."""
    if cache_stop > parts.backend.facts.n_ctx_train:
        raise ContextOverflow(cache_stop, parts.backend.facts.n_ctx_train, "compact first: positions have run on")


def _open_place(parts: Parts, place: Place, n_tokens: int, reason: str) -> int:
    """The cache position of a place for `n_tokens`, after making room there."""
    _require_positions(parts, max(place.cache_start + n_tokens, parts.state.next_cache_position + place.delta))
    if place.delta:
        if not parts.capabilities.position_shift:
            why = parts.refusal("position_shift") or "no position_shift"
            raise UnsupportedOperation("admit", f"its place was closed and cannot be opened again: {why}")
        shift(parts, place.shift_from, place.shift_stop, place.delta, reason)
    return place.cache_start
