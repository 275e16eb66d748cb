"""The fold on hand-made sessions: the golden cases, and every wrong event that was once let through."""

from __future__ import annotations

from typing import Any

import pytest

from kvtape.planner.events import BlockRef, Event, Op, Placement, Way
from kvtape.planner.layout import Segment
from kvtape.planner.ranges import RangeSet
from kvtape.planner.residency import ColdBlock, IllegalEvent, ResidencyMismatch, ResidencyState, apply, fold
from kvtape.planner.residency_state import UNBOUNDED


def events(*steps: dict[str, Any]) -> list[Event]:
    """Number the steps; turns and generations follow from the ops."""
    out: list[Event] = []
    turn = generation = 0
    for seq, step in enumerate(steps):
        turn += step["op"] is Op.PROMPT and step.get("reason") != "suffix"
        generation += step["op"] in (Op.TRUNCATE, Op.RESTORE)
        out.append(Event(run_id="r", session_id="s", seq=seq, at_ns=0, turn=turn, generation=generation, **step))
    return out


def op(name: Op, start: int | None = None, stop: int | None = None, **columns: Any) -> dict[str, Any]:
    return {"op": name, "start": start, "stop": stop, **columns}


OPEN = op(Op.OPEN, n_tokens=64)
SIX = op(Op.PREFILL, 0, 6, cache_start=0)


def evict(start: int, stop: int, way: Way = Way.GAP, *refs: BlockRef) -> dict[str, Any]:
    return op(Op.EVICT, start, stop, way=way, cold=bool(refs), blocks=refs)


def admit(block_id: int, start: int, stop: int, at: int, placement: Placement = Placement.IN_PLACE) -> dict[str, Any]:
    return op(Op.ADMIT, start, stop, block_id=block_id, cache_start=at, placement=placement)


def folded(*steps: dict[str, Any]) -> ResidencyState:
    return fold(events(OPEN, *steps))


def refused(why: str, *steps: dict[str, Any]) -> None:
    """The last step is illegal and those before it are not."""
    *before, last = events(OPEN, *steps)
    state = fold(before)
    with pytest.raises(IllegalEvent, match=why) as caught:
        apply(state, last)
    assert caught.value.event is last


COLD = BlockRef(7, 2, 4)


def test_evict_and_admit_in_place_gives_the_tape_back() -> None:
    assert folded(SIX, evict(2, 4, Way.GAP, COLD)).layout == (Segment(0, 2, 0), Segment(4, 2, 4))
    state = folded(SIX, evict(2, 4, Way.GAP, COLD), admit(7, 2, 4, 2))
    assert state.layout == (Segment(0, 6, 0),)
    assert state.cold == ()


def test_admit_appended_stands_at_the_tail() -> None:
    state = folded(
        SIX,
        evict(2, 4, Way.REBASED, COLD),
        op(Op.SHIFT, 4, 6, delta=-2),
        admit(7, 2, 4, 4, Placement.APPEND),
    )
    assert state.layout == (Segment(0, 2, 0), Segment(4, 2, 2), Segment(2, 2, 4))
    assert state.resident == RangeSet([(0, 6)])


def test_recompute_evicts_into_rank_order() -> None:
    state = folded(SIX, evict(2, 4, Way.RECOMPUTE))
    assert state.layout == (Segment(0, 2, 0), Segment(4, 2, 2))
    assert state.dropped == RangeSet([(2, 4)])


def test_a_stream_of_twenty_keeps_positions_without_gap_or_repeat() -> None:
    """Sink 4, window 8: rebased after each eviction, cache positions are 0..n-1 and distances those of the order."""
    steps = [OPEN, op(Op.PREFILL, 0, 8, cache_start=0)]
    for token in range(8, 20):
        steps += [evict(token - 4, token - 3, Way.REBASED), op(Op.SHIFT, 5, 8, delta=-1)]
        steps.append(op(Op.DECODE, token, token + 1, cache_start=7))
        state = fold(events(*steps))
        rows = {s.tape_start + i: s.cache_start + i for s in state.layout for i in range(s.length)}
        assert sorted(rows.values()) == list(range(8))
        assert [rows[t] for t in sorted(rows)] == list(range(8))
        assert sorted(rows) == [0, 1, 2, 3, *range(token - 3, token + 1)]


def test_truncation_keeps_only_cold_blocks_below_the_cut() -> None:
    blocks = (BlockRef(1, 1, 2), BlockRef(2, 2, 4))
    state = folded(SIX, evict(1, 4, Way.GAP, *blocks), op(Op.TRUNCATE, 3))
    assert [b.block_id for b in state.cold] == [1]
    assert (state.tape_length, state.generation) == (3, 1)


def test_a_position_past_the_cut_names_a_new_token() -> None:
    state = folded(SIX, evict(2, 6), op(Op.TRUNCATE, 3), op(Op.PREFILL, 3, 5, cache_start=2))
    assert state.resident == RangeSet([(0, 2), (3, 5)])
    assert state.dropped == RangeSet([(2, 3)])


def test_restored_cold_blocks_lie_where_they_last_stood() -> None:
    """Block 7 was at cache 2 when the snapshot was taken; it came back at 8 and left from there."""
    state = folded(
        SIX,
        evict(2, 4, Way.GAP, COLD),
        op(Op.SNAPSHOT, snapshot_id=0),
        op(Op.SHIFT, 4, 6, delta=6),
        admit(7, 2, 4, 8),
        evict(2, 4, Way.GAP, COLD),
        op(Op.RESTORE, snapshot_id=0),
    )
    assert state.cold == (ColdBlock(7, 2, 4, 8),)


def test_a_restored_snapshot_does_not_bring_back_blobs_that_are_gone() -> None:
    taken = (SIX, evict(2, 4, Way.GAP, COLD), op(Op.SNAPSHOT, snapshot_id=0))
    trimmed = folded(*taken, op(Op.TRIM, block_id=7), op(Op.RESTORE, snapshot_id=0))
    assert trimmed.cold == ()
    later = folded(*taken, evict(4, 6, Way.GAP, BlockRef(8, 4, 6)), op(Op.RESTORE, snapshot_id=0))
    assert [b.block_id for b in later.cold] == [7], "block 8 is resident again"


def test_only_a_refusal_or_the_close_may_follow_a_fatal() -> None:
    fatal = op(Op.FATAL, error_class="decode_failed")
    state = folded(SIX, fatal, op(Op.REFUSE), op(Op.CLOSE))
    assert (state.fatal, state.closed) == ("decode_failed", True)
    refused("poisoned", SIX, fatal, op(Op.FATAL, error_class="device_lost"))
    refused("poisoned", SIX, fatal, op(Op.DECODE, 6, 7, cache_start=6))
    refused("closed", SIX, op(Op.CLOSE), op(Op.REFUSE))


def test_nothing_can_be_folded_past_lost_events() -> None:
    refused("lost", SIX, op(Op.LOST, n_tokens=3), op(Op.DECODE, 6, 7, cache_start=6))


def test_a_record_of_another_residency_is_named() -> None:
    with pytest.raises(ResidencyMismatch, match=r"seq 1 .*resident_tokens recorded 5, fold gives 6"):
        folded(SIX | {"resident_tokens": 5})


@pytest.mark.parametrize(
    ("why", "steps"),
    [
        ("off the tape", [SIX, op(Op.TRUNCATE, -1)]),
        ("off the tape", [SIX, op(Op.TRUNCATE, 7)]),
        ("already cold", [SIX, evict(2, 4, Way.GAP, COLD), evict(4, 6, Way.GAP, BlockRef(7, 4, 6))]),
        ("one id", [SIX, evict(0, 2, Way.GAP, BlockRef(1, 0, 1), BlockRef(1, 1, 2))]),
        ("is empty", [SIX, evict(0, 2, Way.GAP, BlockRef(1, 1, 1))]),
        ("blocks overlap", [SIX, evict(0, 3, Way.GAP, BlockRef(1, 0, 2), BlockRef(2, 1, 3))]),
        ("outside the range", [SIX, evict(0, 2, Way.GAP, BlockRef(1, 0, 3))]),
        ("not one resident run", [SIX, evict(2, 4), evict(1, 5)]),
        ("not one resident run", [SIX, evict(2, 4), evict(2, 4)]),
        ("needs a way", [SIX, op(Op.EVICT, 2, 4)]),
        # The first rows of a run, moved behind its last ones.
        ("change their order", [SIX, op(Op.SHIFT, 0, 3, delta=20)]),
        ("change their order", [SIX, evict(2, 4), op(Op.SHIFT, 0, 2, delta=10)]),
        ("overlaps", [SIX, evict(2, 4), op(Op.SHIFT, 4, 6, delta=-3)]),
        ("bad segment", [SIX, op(Op.SHIFT, 0, 6, delta=-1)]),
        ("2 rows move", [SIX, evict(2, 4), op(Op.SHIFT, 4, 6, delta=-2, n_tokens=3)]),
        ("moves no resident row", [SIX, op(Op.SHIFT, 6, 9, delta=1)]),
        # Free rows before the others do not make a place in tape order.
        ("neither neighbour", [SIX, evict(4, 6), op(Op.SHIFT, 0, 4, delta=9), op(Op.RECOMPUTE, 4, 6, cache_start=0)]),
        ("overlaps", [SIX, evict(2, 4), op(Op.RECOMPUTE, 2, 4, cache_start=3)]),
        ("overlaps", [SIX, op(Op.RECOMPUTE, 2, 4, cache_start=6, placement=Placement.APPEND)]),
        ("is cold", [SIX, evict(2, 4, Way.GAP, COLD), op(Op.RECOMPUTE, 2, 4, cache_start=2)]),
        ("is not cold", [SIX, evict(2, 4), admit(7, 2, 4, 2)]),
        ("another range", [SIX, evict(2, 4, Way.GAP, COLD), admit(7, 2, 3, 2)]),
        ("needs a placement", [SIX, evict(2, 4, Way.GAP, COLD), admit(7, 2, 4, 2) | {"placement": None}]),
        ("expected 6", [SIX, evict(2, 4, Way.GAP, COLD), admit(7, 2, 4, 2, Placement.APPEND)]),
        ("is not cold", [SIX, evict(2, 4, Way.GAP, COLD), admit(7, 2, 4, 2), op(Op.TRIM, block_id=7)]),
        ("never taken", [SIX, op(Op.RESTORE, snapshot_id=0)]),
        ("of its own", [SIX, op(Op.SNAPSHOT, snapshot_id=0), op(Op.SNAPSHOT, snapshot_id=0)]),
        ("opens once", [OPEN]),
        ("context of 64", [SIX, op(Op.PREFILL, 6, 65, cache_start=6)]),
        ("needs its class", [op(Op.FATAL)]),
    ],
)
def test_an_illegal_event_is_refused(why: str, steps: list[dict[str, Any]]) -> None:
    refused(why, *steps)


def test_a_session_begins_with_its_open() -> None:
    with pytest.raises(IllegalEvent, match="opens once"):
        fold(events(SIX))


def test_a_session_of_unknown_context_is_not_bounded() -> None:
    assert fold(events(op(Op.OPEN), op(Op.PREFILL, 0, 10**9, cache_start=0))).n_ctx == UNBOUNDED
    with pytest.raises(IllegalEvent, match="context of 0"):
        fold(events(op(Op.OPEN, n_tokens=0)))
