"""The lineage: what each computed token saw, as a pure fold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from kvtape.planner import layout as lay
from kvtape.planner.events import Way
from kvtape.planner.ranges import RangeSet
from kvtape.planner.residency import ResidencyState, apply
from kvtape.replay.lineage import Lineage, LineageBuilder, LineageWay, prune
from support.scripted import Script
from support.sessions import random_scripts


def follow(script: Script, way: LineageWay = "log") -> LineageBuilder:
    """The builder after a whole script, its rows checked against the fold on the way."""
    builder, state = LineageBuilder(way), ResidencyState()
    for event in script.events:
        state = apply(state, event)
        row = script.tokens.get(event.seq)
        builder.step(event, state, row.tokens if row else None)
        want = state.layout if way == "log" else lay.rank_layout(state.resident)
        assert builder.layout == want
        rows = builder.rows()
        assert sorted(rows.tape) == [t for r in state.resident for t in range(r.start, r.stop)]
        assert set(rows.slots) <= set(builder.reachable())
    return builder


def seen_by(lineage: Lineage, slot: int) -> dict[int, int]:
    """Slot to cache position of everything that `slot` attended to, itself included."""
    for e in lineage.epochs:
        if e.first <= slot < e.first + e.n:
            own = {s: e.position + s - e.first for s in range(e.first, slot + 1)}
            return {**dict(zip(e.keys.tolist(), e.key_positions.tolist(), strict=True)), **own}
    raise AssertionError(f"slot {slot} is in no epoch")


@given(script=random_scripts(300))
@settings(max_examples=60, deadline=None)
def test_every_slot_is_computed_once_and_sees_only_earlier_ones(script: Script) -> None:
    lineage = follow(script).lineage()
    covered = [s for e in lineage.epochs for s in range(e.first, e.first + e.n)]
    assert covered == list(range(lineage.n_slots))
    for e in lineage.epochs:
        assert (e.keys < e.first).all()
        assert len(set(e.keys.tolist())) == len(e.keys)
        positions = [*e.key_positions.tolist(), *range(e.position, e.position + e.n)]
        assert len(set(positions)) == len(positions)


@given(script=random_scripts(300))
@settings(max_examples=60, deadline=None)
def test_under_recompute_every_query_sees_a_dense_prefix(script: Script) -> None:
    lineage = follow(script, "recompute").lineage()
    for slot in range(lineage.n_slots):
        seen = seen_by(lineage, slot)
        assert sorted(seen.values()) == list(range(len(seen)))
        tape = [int(lineage.tape[s]) for s in sorted(seen, key=lambda s: seen[s])]
        assert tape == sorted(tape)


def test_a_plain_session_is_one_epoch() -> None:
    script = Script()
    script.prefill([5, 6, 7])
    script.decode([8])
    script.prefill([9, 10])
    (epoch,) = follow(script).lineage().epochs
    assert (epoch.first, epoch.n, epoch.position, len(epoch.keys)) == (0, 6, 0, 0)


def test_a_gap_keeps_positions_and_rebasing_moves_them() -> None:
    positions = {}
    for way in (Way.GAP, Way.REBASED):
        script = Script()
        script.prefill([5, 6, 7, 8, 9])
        script.evict(1, 3, way=way)
        script.decode([11])
        positions[way] = seen_by(follow(script).lineage(), 5)
    assert positions[Way.GAP] == {0: 0, 3: 3, 4: 4, 5: 5}
    assert positions[Way.REBASED] == {0: 0, 3: 1, 4: 2, 5: 3}


def test_an_admitted_block_is_the_old_slot_a_refilled_one_is_new() -> None:
    script = Script()
    script.prefill([5, 6, 7, 8, 9])
    (block,) = script.evict(1, 3, cold=True)
    script.decode([11])
    script.admit(block)
    assert follow(script).rows().slots.tolist() == [0, 1, 2, 3, 4, 5]

    again = Script()
    again.prefill([5, 6, 7, 8, 9])
    again.evict(1, 3)
    again.decode([11])
    again.refill(1, 3, 1)
    builder = follow(again)
    assert builder.rows().slots.tolist() == [0, 6, 7, 3, 4, 5]
    assert seen_by(builder.lineage(), 7) == {0: 0, 6: 1, 7: 2}, "a refill sees only what lies before it"


def test_a_recomputing_evict_makes_new_slots_of_the_survivors() -> None:
    script = Script()
    script.prefill([5, 6, 7, 8])
    script.evict(1, 2, way=Way.RECOMPUTE)
    builder = follow(script)
    assert builder.rows().slots.tolist() == [4, 5, 6]
    assert builder.rows().cache.tolist() == [0, 1, 2]
    assert builder.lineage().tokens.tolist() == [5, 6, 7, 8, 5, 7, 8]


def test_restore_brings_back_slots_and_tape() -> None:
    script = Script()
    script.prefill([5, 6, 7, 8])
    saved = script.snapshot()
    script.truncate(2)
    script.prefill([40, 41])
    script.restore(saved)
    script.decode([12])
    builder = follow(script)
    assert builder.rows().slots.tolist() == [0, 1, 2, 3, 6]
    assert builder.tokens_of(RangeSet([(0, 5)])) == [5, 6, 7, 8, 12]


def test_unreachable_slots_are_forgotten() -> None:
    script = Script()
    script.prefill([5, 6, 7, 8])
    script.evict(1, 3)
    assert follow(script).reachable().tolist() == [0, 3]


def test_pruning_drops_what_nothing_wanted_depends_on() -> None:
    script = Script()
    script.prefill([5, 6, 7, 8])
    script.evict(1, 2, way=Way.RECOMPUTE)
    script.decode([12])
    lineage = follow(script).lineage()
    pruned, wanted = prune(lineage, np.array([7]))
    assert pruned.tokens.tolist() == [5, 7, 8, 12], "the first computation is gone: only the rebuilt rows are seen"
    assert wanted.tolist() == [3]


def test_tokens_that_the_log_lacks_are_an_error() -> None:
    script = Script()
    script.prefill([5, 6])
    builder = LineageBuilder()
    state = ResidencyState()
    for event in script.events[:1]:
        state = apply(state, event)
        builder.step(event, state, None)
    with pytest.raises(ValueError, match="seq 1"):
        builder.step(script.events[1], apply(state, script.events[1]), (5,))
