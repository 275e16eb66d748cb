"""The residency fold beside a plain model: every legal event agrees, every illegal one changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtape.planner.event_columns import EventColumns
from kvtape.planner.events import BlockRef, Event, Op, Placement, Way
from kvtape.planner.fold_columns import fold_columns
from kvtape.planner.ranges import RangeSet
from kvtape.planner.residency import IllegalEvent, ResidencyMismatch, ResidencyState, apply, check_event
from support.residency_model import Cold, Model, cut_refs

N_CTX = 24
small = st.integers(0, 63)
EFFECT_WAYS = (Way.GAP, Way.REBASED, Way.RECOMPUTE)


class ResidencyMachine(RuleBasedStateMachine):
    """Rules draw indices; the model says what they can mean in the state at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(N_CTX)
        self.state = ResidencyState()
        self.over = False
        self.retired: list[int] = []
        self.events: list[Event] = []

    def feed(self, op: Op, **columns: Any) -> None:
        """Apply the event of a change that the model has already made."""
        event = self.model.event(op, **columns)
        self.state = apply(self.state, event)
        check_event(self.state, event)
        self.model.seq += 1
        self.events.append(event)

    def teardown(self) -> None:
        """Whatever ops the run drew, their columns fold to the same state."""
        folded = fold_columns(EventColumns.of(self.events))
        assert (folded, folded.snapshots) == (self.state, self.state.snapshots)

    @initialize()
    def open(self) -> None:
        self.feed(Op.OPEN, n_tokens=N_CTX)

    # -- tape ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.over)
    @rule(common=small, more=small)
    def prompt(self, common: int, more: int) -> None:
        common %= len(self.model.tape) + 1
        self.model.turn += 1
        self.model.prefix = common + more
        self.feed(Op.PROMPT, start=common, n_tokens=common + more)

    @precondition(lambda self: not self.over)
    @rule(n=small)
    def suffix(self, n: int) -> None:
        self.feed(Op.PROMPT, start=len(self.model.tape), n_tokens=n, reason="suffix")

    @precondition(lambda self: not self.over and self.model.room > 0)
    @rule(n=small, op=st.sampled_from([Op.PREFILL, Op.DECODE]))
    def extend(self, n: int, op: Op) -> None:
        n = 1 + n % self.model.room
        start, at = len(self.model.tape), self.model.next_row
        self.model.extend(n)
        self.feed(op, start=start, stop=start + n, n_tokens=n, cache_start=at)

    @precondition(lambda self: not self.over)
    @rule(at=small, rebuilt=st.booleans())
    def truncate(self, at: int, rebuilt: bool) -> None:
        at %= len(self.model.tape) + 1
        self.model.cut(at)
        if rebuilt:
            self.model.rank()
        self.feed(Op.TRUNCATE, start=at, way=Way.RECOMPUTE if rebuilt else None)

    # -- residency ----------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.over and self.model.cache)
    @rule(which=small, skip=small, length=small, cut=small, way=st.sampled_from(EFFECT_WAYS), cold=st.booleans())
    def evict(self, which: int, skip: int, length: int, cut: int, way: Way, cold: bool) -> None:
        runs = self.model.runs()
        start, stop = runs[which % len(runs)]
        start += skip % (stop - start)
        stop = start + 1 + length % (stop - start)
        refs = cut_refs(self.model.block, start, stop, cut % 4)
        self.model.block += len(refs)
        if len(refs) == 1 and self.retired:
            # A block that came back may leave again under its own id.
            refs = (replace(refs[0], block_id=self.retired.pop()),)
        at = self.model.cache[start]
        self.model.drop(start, stop)
        if cold:
            self.model.cold |= {r.block_id: Cold(r.start, r.stop, at + r.start - start) for r in refs}
        if way is Way.RECOMPUTE:
            self.model.rank()
        self.feed(Op.EVICT, start=start, stop=stop, cache_start=at, way=way, cold=cold, blocks=refs)
        tail = self.model.next_row
        if way is Way.REBASED and tail > at:
            self.shift_rows(at + stop - start, tail, start - stop)

    def shift_rows(self, start: int, stop: int, delta: int) -> None:
        self.model.move(start, stop, delta)
        self.feed(Op.SHIFT, start=start, stop=stop, delta=delta)

    @precondition(lambda self: not self.over and self.model.cache)
    @rule(which=small, delta=st.integers(1, 5))
    def open_a_gap(self, which: int, delta: int) -> None:
        rows = sorted(self.model.cache.values())
        self.shift_rows(rows[which % len(rows)], self.model.next_row, delta)

    @precondition(lambda self: not self.over and self.model.next_row > len(self.model.cache))
    @rule()
    def close_the_first_gap(self) -> None:
        rows = sorted(self.model.cache.values())
        hole = next(i for i, row in enumerate(rows) if row != i)
        self.shift_rows(rows[hole], self.model.next_row, hole - rows[hole])

    def put_back(self, op: Op, start: int, stop: int, append: bool, **columns: Any) -> bool:
        """Rows `[start, stop)` into the cache; False where they do not fit."""
        if stop - start > self.model.room or any(p in self.model.cache for p in range(start, stop)):
            return False
        at = self.model.next_row if append else self.model.place(start, stop)
        if at is None:
            return False
        self.model.cache |= {start + i: at + i for i in range(stop - start)}
        placement = Placement.APPEND if append else Placement.IN_PLACE
        self.feed(op, start=start, stop=stop, cache_start=at, placement=placement, **columns)
        return True

    @precondition(lambda self: not self.over and self.model.cold)
    @rule(which=small, append=st.booleans())
    def admit(self, which: int, append: bool) -> None:
        block_id = sorted(self.model.cold)[which % len(self.model.cold)]
        cold = self.model.cold.pop(block_id)
        if not self.put_back(Op.ADMIT, cold.start, cold.stop, append, block_id=block_id):
            self.model.cold[block_id] = cold
        else:
            self.retired.append(block_id)

    @precondition(lambda self: not self.over and self.model.holes())
    @rule(which=small, length=small, append=st.booleans())
    def recompute(self, which: int, length: int, append: bool) -> None:
        holes = self.model.holes()
        start, stop = holes[which % len(holes)]
        stop = start + 1 + length % (stop - start)
        if not any(c.start < stop and start < c.stop for c in self.model.cold.values()):
            self.put_back(Op.RECOMPUTE, start, stop, append)

    @precondition(lambda self: not self.over and self.model.cold)
    @rule(which=small)
    def trim(self, which: int) -> None:
        block_id = sorted(self.model.cold)[which % len(self.model.cold)]
        del self.model.cold[block_id]
        self.feed(Op.TRIM, block_id=block_id)

    @precondition(lambda self: not self.over and len(self.model.snapshots) < 3)
    @rule()
    def snapshot(self) -> None:
        snapshot_id = len(self.model.snapshots)
        self.model.save(snapshot_id)
        self.feed(Op.SNAPSHOT, snapshot_id=snapshot_id)

    @precondition(lambda self: not self.over and self.model.snapshots)
    @rule(which=small)
    def restore(self, which: int) -> None:
        snapshot_id = which % len(self.model.snapshots)
        self.model.load(snapshot_id)
        self.feed(Op.RESTORE, snapshot_id=snapshot_id)

    # -- what changes nothing, and ends ---------------------------------------------------------------------------

    @precondition(lambda self: not self.over)
    @rule(op=st.sampled_from([Op.GENERATE, Op.SCORE, Op.PLAN, Op.REFUSE]))
    def remark(self, op: Op) -> None:
        before = self.state
        self.feed(op)
        assert self.state == replace(before, next_seq=self.model.seq)

    @precondition(lambda self: not self.over and self.model.seq > 25)
    @rule(how=st.sampled_from([Op.FATAL, Op.CLOSE, Op.LOST]))
    def end(self, how: Op) -> None:
        self.feed(how, error_class="decode_failed" if how is Op.FATAL else None)
        self.over = True
        if how is Op.FATAL:
            assert self.state.fatal == "decode_failed"
            self.feed(Op.REFUSE)

    @precondition(lambda self: self.over and self.state.fatal and not self.state.closed)
    @rule()
    def close_after_fatal(self) -> None:
        self.feed(Op.CLOSE)
        assert self.state.fatal == "decode_failed", "the first cause stays"

    @rule(which=small, by=small)
    def illegal(self, which: int, by: int) -> None:
        event = self.illegal_event(which, by)
        kept = self.state
        seen = repr(kept), kept.snapshots
        with pytest.raises(IllegalEvent, match=f"session s seq {event.seq} "):
            apply(self.state, event)
        assert self.state is kept
        assert (repr(kept), kept.snapshots) == seen

    def illegal_event(self, which: int, by: int) -> Event:
        """One of the events that this state must refuse."""
        m = self.model
        end, row, room = len(m.tape), m.next_row, m.room
        more = 1 + by % 4
        a_row = sorted(m.cache)[by % len(m.cache)] if m.cache else None
        a_hole = m.holes()[by % len(m.holes())] if m.holes() else None
        cold = sorted(m.cold)[by % len(m.cold)] if m.cold else None
        extend = {"stop": end + more, "n_tokens": more, "cache_start": row}
        cases: list[Event] = [
            replace(m.event(Op.PLAN), seq=m.seq + more),
            replace(m.event(Op.PLAN), generation=m.generation + 1),
            replace(m.event(Op.PLAN), turn=m.turn + 1),
            m.event(Op.TRUNCATE, start=end),  # leaves the generation where it was
            m.event(Op.OPEN, n_tokens=N_CTX),
            m.event(Op.DECODE, start=end + more, **(extend | {"stop": end + 2 * more})),
            m.event(Op.DECODE, start=end, **(extend | {"cache_start": row + more})),
            m.event(Op.PREFILL, start=end, **(extend | {"cache_start": None})),
            m.event(Op.PREFILL, start=end, **(extend | {"n_tokens": more + 1})),
            m.event(Op.PREFILL, start=end, **(extend | {"stop": end})),
            m.event(Op.PREFILL, start=end, stop=end + room + more, n_tokens=room + more, cache_start=row),
            m.event(Op.PROMPT, start=end + more, n_tokens=end + 2 * more),
            m.event(Op.PROMPT, start=end, n_tokens=None),
            m.event(Op.EVICT, start=end, stop=end + more, way=Way.GAP),
            replace(m.event(Op.RESTORE, snapshot_id=99), generation=m.generation + 1),
            replace(m.event(Op.TRUNCATE, start=end + more), generation=m.generation + 1),
            replace(m.event(Op.TRUNCATE, start=-1), generation=m.generation + 1),
            m.event(Op.TRIM, block_id=10_000),
            m.event(Op.ADMIT, block_id=10_000, start=0, stop=1, cache_start=row, placement=Placement.APPEND),
            m.event(Op.RECOMPUTE, start=end, stop=end + more, cache_start=row),
            m.event(Op.SHIFT, start=row, stop=row + more, delta=1),
            m.event(Op.SHIFT, start=0, stop=row + 1, delta=0),
            m.event(Op.FATAL),
        ]
        if m.snapshots:
            cases.append(m.event(Op.SNAPSHOT, snapshot_id=by % len(m.snapshots)))
        if a_row is not None:
            at = m.cache[a_row]
            one = {"start": a_row, "stop": a_row + 1}
            cases += [
                m.event(Op.EVICT, **one, cache_start=at),
                m.event(Op.EVICT, **one, cache_start=at + 1, way=Way.GAP),
                m.event(Op.EVICT, start=a_row, stop=m.runs()[-1][1] + 1, way=Way.GAP),
                m.event(Op.EVICT, **one, way=Way.GAP, cold=True, blocks=(BlockRef(m.block, a_row, a_row + 2),)),
                m.event(Op.EVICT, **one, way=Way.GAP, cold=True, blocks=(BlockRef(m.block, a_row, a_row),)),
                m.event(Op.RECOMPUTE, **one, cache_start=row),
                m.event(Op.SHIFT, start=at, stop=at + 1, delta=-at - 1),
                m.event(Op.SHIFT, start=at, stop=at + 1, delta=1, n_tokens=2),
            ]
            # Rows may not pass each other: any row but the last, moved behind the last.
            if at != row - 1:
                cases.append(m.event(Op.SHIFT, start=at, stop=at + 1, delta=row - at))
            run = m.runs()[by % len(m.runs())]
            if run[1] - run[0] >= 2:
                # Two blocks with one id.
                ids = (BlockRef(m.block, run[0], run[0] + 1), BlockRef(m.block, run[0] + 1, run[1]))
                cases.append(m.event(Op.EVICT, start=run[0], stop=run[1], way=Way.GAP, cold=True, blocks=ids))
            if cold is not None:
                again = (BlockRef(cold, a_row, a_row + 1),)
                cases.append(m.event(Op.EVICT, **one, way=Way.GAP, cold=True, blocks=again))
        if a_hole is not None and m.cache:
            one = {"start": a_hole[0], "stop": a_hole[0] + 1}
            if max(m.cache) < a_hole[0] and min(m.cache.values()) > 0:
                # Behind every row in the tape, before every row in the cache.
                cases.append(m.event(Op.RECOMPUTE, **one, cache_start=0))
            cases.append(m.event(Op.RECOMPUTE, **one, cache_start=row + 1, placement=Placement.APPEND))
        if cold is not None:
            span = m.cold[cold]
            cases += [
                m.event(Op.ADMIT, block_id=cold, start=span.start, stop=span.stop + 1, cache_start=row),
                m.event(Op.ADMIT, block_id=cold, start=span.start, stop=span.stop, cache_start=row),
            ]
        if self.over:
            return m.event(Op.DECODE, start=end, **extend)
        return cases[which % len(cases)]

    @precondition(lambda self: not self.over)
    @rule(what=st.sampled_from(["resident_tokens", "resident_digest", "layout_digest"]), off=st.integers(1, 9))
    def wrong_record(self, what: str, off: int) -> None:
        event = self.model.event(Op.PLAN)
        wrong = replace(event, **{what: getattr(event, what) ^ off})
        with pytest.raises(ResidencyMismatch, match=what):
            check_event(apply(self.state, wrong), wrong)

    # -- the two agree --------------------------------------------------------------------------------------------

    @invariant()
    def agree(self) -> None:
        m, s = self.model, self.state
        assert {seg.tape_start + i: seg.cache_start + i for seg in s.layout for i in range(seg.length)} == m.cache
        assert (s.tape_length, s.generation, s.turn, s.prefix_length) == (len(m.tape), m.generation, m.turn, m.prefix)
        assert s.resident_tokens == len(m.cache) <= N_CTX
        assert s.resident == RangeSet((p, p + 1) for p in m.cache)
        assert s.next_cache_position == m.next_row
        assert {b.block_id: Cold(b.start, b.stop, b.cache_start) for b in s.cold} == m.cold
        held = set(m.cache) | {p for c in m.cold.values() for p in range(c.start, c.stop)}
        assert s.dropped == RangeSet((p, p + 1) for p in range(len(m.tape)) if p not in held)
        assert s.snapshot_ids() == tuple(m.snapshots)


ResidencyMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestResidencyFold = ResidencyMachine.TestCase
