"""Random sessions: after every operation books, host copy and engine agree, and the books are a plain list's."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtape.planner import layout as lay
from kvtape.planner.layout import Layout
from kvtape.planner.ranges import RangeSet
from support.openvino_tiny import assert_whole, tiny_session, tokens

__all__ = ["Machine"]

N_CTX = 256


class Machine(RuleBasedStateMachine):
    """`config` of its sessions, on the tiny `model`."""

    config: ClassVar[dict[str, Any]] = {}
    model = "llama-two-kv-heads"

    def __init__(self) -> None:
        super().__init__()
        self.backend = tiny_session(self.model, n_ctx=N_CTX, **self.config)
        self.layout: Layout = ()
        self.tape: list[int] = []
        self.cold: list[tuple[bytes, int, int, int]] = []
        self.saved: list[tuple[bytes, Layout, int]] = []

    def teardown(self) -> None:
        self.backend.close()

    @property
    def room(self) -> int:
        return N_CTX - sum(s.length for s in self.layout)

    @precondition(lambda self: self.room >= 20)
    @rule(n=st.integers(1, 20), seed=st.integers(0, 5))
    def prefill(self, n: int, seed: int) -> None:
        ids = tokens(n, seed)
        at, start = lay.next_cache_position(self.layout), len(self.tape)
        assert self.backend.prefill(ids, start).tokens == n
        self.tape += ids
        self.layout = lay.append(self.layout, start, n, at)

    @precondition(lambda self: self.room >= 3 and self.layout)
    @rule()
    def decode(self) -> None:
        at, start = lay.next_cache_position(self.layout), len(self.tape)
        run = self.backend.decode_until(3, N_CTX, start, np.zeros(320, np.float32), lambda x: 3 + int(x.argmax()) % 250)
        self.tape += run.tokens
        self.layout = lay.append(self.layout, start, 3, at)

    @precondition(lambda self: self.layout)
    @rule(data=st.data(), cold=st.booleans())
    def evict(self, data: st.DataObject, cold: bool) -> None:
        seg = data.draw(st.sampled_from(self.layout))
        start = data.draw(st.integers(seg.tape_start, seg.tape_stop - 1))
        stop = data.draw(st.integers(start + 1, seg.tape_stop))
        if cold:
            at = seg.cache_start + start - seg.tape_start
            self.cold.append((self.backend.export_block(start, stop), start, stop, at))
        self.backend.evict(start, stop)
        self.layout = lay.remove(self.layout, start, stop)

    @precondition(lambda self: self.layout)
    @rule(data=st.data(), delta=st.integers(-30, 30).filter(bool))
    def shift(self, data: st.DataObject, delta: int) -> None:
        seg = data.draw(st.sampled_from(self.layout))
        stop = self.layout[-1].cache_stop
        try:
            moved = lay.shift(self.layout, seg.cache_start, stop, delta)
        except ValueError:
            return
        self.backend.shift(seg.cache_start, stop, delta)
        self.layout = moved

    @precondition(lambda self: self.cold)
    @rule(data=st.data(), append=st.booleans())
    def admit(self, data: st.DataObject, append: bool) -> None:
        block, start, stop, at = data.draw(st.sampled_from(self.cold))
        if stop > len(self.tape) or self.room < stop - start:
            return
        at = lay.next_cache_position(self.layout) if append else at
        try:
            layout = lay.append(self.layout, start, stop - start, at)
        except ValueError:
            return
        self.backend.admit(block, start, at)
        self.layout = layout

    @precondition(lambda self: self.layout)
    @rule(data=st.data())
    def refill(self, data: st.DataObject) -> None:
        gone = RangeSet([(0, len(self.tape))]) - lay.resident_ranges(self.layout)
        if not gone:
            return
        hole = data.draw(st.sampled_from(gone.ranges))
        at = data.draw(st.integers(0, lay.next_cache_position(self.layout)))
        try:
            layout = lay.append(self.layout, hole.start, len(hole), at)
        except ValueError:
            return
        if self.room < len(hole):
            return
        self.backend.refill(self.tape[hole.start : hole.stop], hole.start, at)
        self.layout = layout

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        stop = data.draw(st.integers(len(self.tape) // 2, len(self.tape)))
        self.backend.truncate(stop)
        del self.tape[stop:]
        self.layout = lay.cut(self.layout, stop)
        self.cold = [c for c in self.cold if c[2] <= stop]

    @rule()
    def rebuild(self) -> None:
        ranges = lay.resident_ranges(self.layout)
        self.backend.rebuild(ranges, [t for r in ranges for t in self.tape[r.start : r.stop]])
        self.layout = lay.rank_layout(ranges)

    @rule()
    def snapshot(self) -> None:
        self.saved.append((self.backend.snapshot(), self.layout, len(self.tape)))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        blob, layout, length = data.draw(st.sampled_from(self.saved))
        if length > len(self.tape):
            return
        self.backend.restore(blob)
        self.layout = layout
        del self.tape[length:]
        self.cold = []
        assert self.backend.snapshot() == blob

    @invariant()
    def whole(self) -> None:
        assert self.backend.books() == self.layout
        assert_whole(self.backend)
