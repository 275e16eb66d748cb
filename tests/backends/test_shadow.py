"""The shadow pass on the toy: it follows the tape whatever happens to it, and the session does not notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.backends.clock import ManualClock, StoppableClock
from kvtape.backends.errors import (
    Cancelled,
    ChoiceFailed,
    SessionFatal,
    UnsupportedOperation,
    UsageError,
)
from kvtape.backends.protocol import Computed, FlashAttention, ModelFacts, SessionConfig
from kvtape.backends.session import Session
from kvtape.backends.shadow import Shadow, open_shadow
from kvtape.planner.blocks import PromptSegment
from kvtape.planner.events import Op
from kvtape.planner.specs import parse_policy
from kvtape.sim.errors import NoAttention
from kvtape.testing.sink import ListSink
from kvtape.testing.toy import ToyBackend, open_toy
from kvtape.traces.errors import LogWriteFailed
from support.attention_maps import map_of, without_dense

CONFIG = SessionConfig(n_ctx=24, chunk=8, cold_budget_tokens=64)
SCORES = replace(CONFIG, options={"scores": "on"})
WIDE = replace(SCORES, n_ctx=256)
POLICIES = (
    "none:block=4",
    "stream:sink=4,recent=12,block=4",
    "h2o:budget=20,recent=8,block=4",
    "tova:budget=20,block=4",
)


class WorkClock:
    """Stands still but for `pass_ns`."""

    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        return self.ns


class Working(ToyBackend):
    """A toy whose computing takes time on a clock; `on_prefill` may do more."""

    def __init__(self, config: SessionConfig, clock: WorkClock, ns_per_token: int) -> None:
        super().__init__(config, open_toy(config).capabilities)
        self._work_clock, self._ns = clock, ns_per_token
        self.on_prefill: Callable[[], None] = lambda: None
        self.prefilled: list[int] = []

    def prefill(self, tokens: Any, tape_start: int) -> Computed:
        self.on_prefill()
        done = super().prefill(tokens, tape_start)
        self._work_clock.ns += self._ns * len(tokens)
        self.prefilled.append(len(tokens))
        return done


class World:
    """A session on a toy with a shadow, or without one."""

    def __init__(self, policy: str = POLICIES[0], *, shadow: bool = True, every: int = 4, config: Any = SCORES) -> None:
        self.time = WorkClock()
        clock = StoppableClock(self.time)
        self.sink = ListSink()
        self.backend = Working(config, self.time, 10)
        self.dense = Working(WIDE, self.time, 1_000_000)
        self.shadow = Shadow(self.dense, clock, every) if shadow else None
        self.session = Session(
            self.backend, parse_policy(policy), self.sink, clock, run_id="r", session_id="s", shadow=self.shadow
        )

    @property
    def measured(self) -> list[tuple[int, int, bool]]:
        dense = [e for e in self.sink.events if e.reason == "dense"]
        return [(e.start, e.stop, "repeated" in json.loads(e.detail or "")) for e in dense]  # type: ignore[misc]


def tokens(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 60, n)]


def play(session: Session) -> None:
    """Every kind of call: growing, diverging, going back, evicting, scoring, refused."""
    first = tokens(16)
    session.ensure_prefix(first)
    session.decode(6)
    session.ensure_prefix(first[:10] + tokens(9, 1))
    taken = session.snapshot()
    session.prefill_suffix(tokens(3, 2))
    last = session.resident.ranges[-1].start
    session.evict(last, last + 2)
    session.restore(taken)
    session.ensure_prefix(list(session.tape))  # identical: its last token is computed again
    session.decode(2)
    session.score(tokens(3, 3))
    with pytest.raises(UsageError):
        session.evict(400, 500)
    session.ensure_prefix(first)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_session_is_the_same_with_and_without_a_shadow(policy: str) -> None:
    recorded = []
    for shadow in (True, False):
        world = World(policy, shadow=shadow)
        with world.session as session:
            play(session)
        recorded.append(world)
    beside, alone = recorded
    assert beside.measured
    assert beside.dense.prefilled
    assert without_dense(beside.sink) == alone.sink  # times, plans, blocks and scores too
    assert beside.time.ns > alone.time.ns  # but it took its time
    map_of(beside.sink)  # complete


CALLS = st.one_of(
    st.tuples(st.just("grow"), st.integers(1, 12), st.integers(0, 3)),
    st.tuples(st.just("diverge"), st.integers(0, 30), st.integers(1, 9)),
    st.tuples(st.just("decode"), st.integers(1, 5), st.just(0)),
    st.tuples(st.just("snapshot"), st.just(0), st.just(0)),
    st.tuples(st.just("restore"), st.integers(0, 2), st.just(0)),
)


@settings(max_examples=25)
@given(st.sampled_from(POLICIES[1:]), st.integers(1, 9), st.lists(CALLS, min_size=1, max_size=8))
def test_whatever_happens_to_the_tape_every_query_in_force_is_that_of_a_dense_pass(
    policy: str, every: int, calls: list[tuple[str, int, int]]
) -> None:
    world = World(policy, every=every)
    with world.session as session:
        session.ensure_prefix(tokens(7))
        taken = 0
        for kind, n, seed in calls:
            if kind == "grow":
                session.ensure_prefix([*session.tape, *tokens(n, seed)])
            elif kind == "diverge":
                session.ensure_prefix([*session.tape[:n], *tokens(seed, n)])
            elif kind == "decode":
                session.ensure_prefix(list(session.tape))
                session.decode(n)
            elif kind == "snapshot":
                session.snapshot()
                taken += 1
            elif taken:
                session.restore(n % taken)
            tape = list(session.tape)
            found = map_of(world.sink)
            assert found.complete(session._parts.state.turn, len(tape))
            reference = open_toy(WIDE)
            before = 0
            for piece in _in_force(found, session._parts.state.turn, len(tape)):
                assert piece.start == before
                assert piece.n_queries <= every
                before = piece.stop
                reference.prefill(tape[piece.start : piece.stop], piece.start)
                mass = reference.take_mass()
                for got, want in ((piece.mass, mass.mass), (piece.peak, mass.peak)):
                    np.testing.assert_allclose(got, np.add.reduceat(want, piece.starts, axis=1), rtol=1e-4, atol=1e-6)
            assert before == len(tape)


def _in_force(found: Any, turn: int, length: int) -> Any:
    """As the map has it at the turn's end, also where a turn went on twice."""
    return found.path_before(1 << 40, length).pieces


def test_pieces_end_where_blocks_end() -> None:
    world = World("stream:sink=4,recent=8,block=4", every=8)
    with world.session as session:
        segments = [PromptSegment(kind="system", tokens=tuple(tokens(6))), PromptSegment(kind="user", tokens=(9,) * 11)]
        session.ensure_prefix(segments)
        assert world.measured == [(0, 6, False), (6, 14, False), (14, 17, False)]
        session.decode(3)
        assert world.measured[3:] == [(17, 20, False)]
    rows = [(r.start, r.stop) for r in world.sink.scores if r.seq == world.sink.events[-3].seq + 1]
    blocks = {(b.start, b.stop) for b in world.sink.blocks}
    # The first keys are measured in parts that double, for the sake of sinks.
    assert rows[:3] == [(0, 1), (1, 2), (2, 4)]
    assert all(any(a <= start and stop <= b for a, b in blocks) for start, stop in rows)
    assert {start for start, _ in rows} <= {a for a, _ in blocks} | {1, 2, 4, 8, 16}
    assert (6, 8) in rows


def test_blocks_that_were_evicted_have_rows_too() -> None:
    world = World("stream:sink=4,recent=8,block=4")
    with world.session as session:
        session.ensure_prefix(tokens(40))
        resident = session.resident
        assert resident.n_tokens < 40
    found = map_of(world.sink)
    last = found.pieces[-1]
    gone = [i for i, a in enumerate(last.starts.tolist()) if a not in resident]
    assert gone
    assert (last.mass[:, gone] > 0).all()
    np.testing.assert_allclose(last.mass.sum(axis=1), last.mass.sum(axis=1)[0], rtol=1e-5)


def test_a_cut_through_a_piece_measures_what_is_left_of_it_again() -> None:
    world = World(every=4)
    with world.session as session:
        session.ensure_prefix(tokens(8))
        session.ensure_prefix([*tokens(8)[:6], 1, 2, 1])
    assert world.measured == [(0, 4, False), (4, 8, False), (4, 6, True), (6, 9, False)]


def test_a_tape_that_a_restore_brings_back_was_not_computed_then() -> None:
    world = World(every=4)
    with world.session as session:
        session.ensure_prefix(tokens(8))
        taken = session.snapshot()
        session.ensure_prefix([*tokens(8)[:4], 1, 1, 1])
        session.restore(taken)
    assert world.measured == [(0, 4, False), (4, 8, False), (4, 7, False), (4, 8, True)]


def test_tokens_computed_again_are_measured_again() -> None:
    world = World(every=4)
    with world.session as session:
        session.ensure_prefix(tokens(8))
        session.ensure_prefix(tokens(8))  # its last token, for the logits
    assert world.measured == [(0, 4, False), (4, 8, False), (4, 7, True), (7, 8, False)]
    map_of(world.sink)


@pytest.mark.parametrize("fault", ["engine", "unexpected", "not_finite", "too_long"])
def test_a_shadow_that_fails_is_given_up_once_and_the_session_goes_on(fault: str, monkeypatch: Any) -> None:
    world, alone = World(), World(shadow=False)
    with world.session as session, alone.session as other:
        for s in (session, other):
            s.ensure_prefix(tokens(8))
        if fault == "engine":
            world.dense.faults.add("prefill")
        elif fault == "unexpected":
            monkeypatch.setattr(world.dense, "take_mass", lambda: 1 / 0)
        elif fault == "not_finite":
            mass = open_toy(WIDE).take_mass
            bad = replace(mass(), mass=np.full((2, 0), np.nan, np.float32))
            monkeypatch.setattr(world.dense, "take_mass", lambda: replace(bad, mass=np.full((2, 1), np.nan)))
        else:
            world.dense.n_ctx = 10
        for s in (session, other):
            s.ensure_prefix(tokens(14))
            s.decode(2)
    assert world.shadow is not None
    assert world.shadow.given_up
    assert ("opened for a shorter tape" in world.shadow.given_up) == (fault == "too_long")
    assert not world.shadow.behind
    assert world.dense.closed
    (said,) = [e for e in world.sink.events if e.op is Op.REFUSE]
    assert (said.reason or "").startswith("dense: ")
    left = [e for e in without_dense(world.sink).events if e.op is not Op.REFUSE]
    numbered = [replace(e, seq=i) for i, e in enumerate(left)]
    assert numbered == alone.sink.events
    with pytest.raises(NoAttention, match=r"seq \d+: dense: .*record it with"):
        map_of(world.sink)


def test_a_log_that_cannot_be_written_is_not_the_shadows_to_forgive() -> None:
    class Full(ListSink):
        def record(self, event: Any, **rest: Any) -> None:
            if event.reason == "dense":
                raise LogWriteFailed("full")
            super().record(event, **rest)

    world = World()
    world.session._parts.journal._sink = Full()
    with pytest.raises(LogWriteFailed):
        world.session.ensure_prefix(tokens(8))
    assert world.session.ended
    assert world.dense.closed == world.backend.closed == 1


def test_a_cancel_while_the_shadow_computes_leaves_it_behind_and_it_catches_up() -> None:
    world = World(every=4)
    assert world.shadow is not None
    with world.session as session:
        world.dense.on_prefill = lambda: session.cancel() if len(world.dense.prefilled) == 1 else None
        session.ensure_prefix(tokens(12))
        world.dense.on_prefill = lambda: None
        assert world.shadow.behind
        assert world.measured == [(0, 4, False)]
        with pytest.raises(NoAttention, match=r"turn 1: the attention of queries \[4, 12\)"):
            map_of(world.sink)
        with pytest.raises(Cancelled):
            session.prefill_suffix(tokens(2))  # the session itself was asked to stop too
        session.prefill_suffix(tokens(2))
        assert not world.shadow.behind
    assert map_of(world.sink).complete(1, 14)


def test_a_turn_that_ended_before_the_shadow_caught_up_was_not_measured() -> None:
    world = World(every=4)
    with world.session as session:
        world.dense.on_prefill = lambda: session.cancel() if world.dense.prefilled else None
        session.ensure_prefix(tokens(12))
        world.dense.on_prefill = lambda: None
        with pytest.raises(Cancelled):
            session.ensure_prefix(tokens(14))
        session.ensure_prefix(tokens(14))
    with pytest.raises(NoAttention, match=r"turn 1: the attention of queries \[4, 12\)"):
        map_of(world.sink)


def test_a_cancel_of_the_session_is_not_one_of_the_shadow() -> None:
    world = World()
    assert world.shadow is not None
    with world.session as session:
        session.ensure_prefix(tokens(8))
        session.cancel()
        with pytest.raises(Cancelled):
            session.ensure_prefix(tokens(12))
        session.ensure_prefix(tokens(12))
        assert world.shadow.given_up is None
        assert not world.shadow.behind
    map_of(world.sink)


def test_what_was_taken_back_needs_no_measuring() -> None:
    def bad(logits: Any) -> int:
        raise ValueError

    world = World()
    with world.session as session:
        session.ensure_prefix(tokens(8))
        with pytest.raises(ChoiceFailed):
            session.decode(3, choose=bad)
        world.backend.cancel_after = 1  # in its second piece of 8 tokens
        with pytest.raises(Cancelled):
            session.prefill_suffix(tokens(12))
        assert [e.op for e in world.sink.events[-3:]] == [Op.PREFILL, Op.TRUNCATE, Op.REFUSE]
        session.ensure_prefix([*tokens(8), 4])
    map_of(world.sink)


def test_a_session_that_dies_in_a_call_has_tokens_that_were_not_measured() -> None:
    world = World("stream:sink=4,recent=8,block=4")
    session = world.session
    session.ensure_prefix(tokens(8))
    world.backend.on_prefill = lambda: world.backend.faults.add("prefill") if len(world.backend.prefilled) > 2 else None
    with pytest.raises(SessionFatal):
        session.ensure_prefix([9, *tokens(30, 1)])
    assert world.dense.closed == 1
    with pytest.raises(NoAttention, match="turn 2"):
        map_of(world.sink)


def test_an_interrupt_inside_the_shadow_closes_the_session() -> None:
    world = World()

    def strike() -> None:
        raise KeyboardInterrupt

    world.dense.on_prefill = strike
    with pytest.raises(KeyboardInterrupt):
        world.session.ensure_prefix(tokens(8))
    assert world.sink.events[-1].op is Op.CLOSE
    assert world.sink.events[-1].reason == "interrupted"
    assert world.dense.closed == world.backend.closed == 1


def test_the_clock_without_what_passed_while_it_stood() -> None:
    time = WorkClock()
    clock = StoppableClock(time)
    time.ns = 5
    assert clock.now_ns() == 5
    with clock.stopped():
        time.ns = 50
        assert clock.now_ns() == 5
    assert clock.now_ns() == 5
    time.ns = 60
    assert clock.now_ns() == 15
    stopped = clock.stopped()
    stopped.__enter__()
    time.ns = 100
    assert not stopped.__exit__(KeyError, KeyError(), None)
    assert clock.now_ns() == 15


class ToyEngine:
    """Opens toys; `facts` say how long a tape they were trained on."""

    name, version = "toy", "1"

    def __init__(self, n_ctx_train: int = 100) -> None:
        self.facts = ModelFacts("toy", "toy/1", "toy", 64, n_ctx_train, frozenset())
        self.opened: list[ToyBackend] = []

    def open(self, config: SessionConfig) -> ToyBackend:
        self.opened.append(ToyBackend(config, open_toy(replace(config, options={})).capabilities))
        return self.opened[-1]


class ScoringEngine(ToyEngine):
    def open(self, config: SessionConfig) -> ToyBackend:
        self.opened.append(open_toy(config))
        return self.opened[-1]


def test_a_shadow_is_opened_for_the_whole_tape_and_for_scores() -> None:
    engine = ScoringEngine()
    asked = replace(CONFIG, flash_attention="on", cold_budget_bytes=7, kv_type_k="f32")
    open_shadow(engine, asked, StoppableClock(ManualClock()), tokens=77).close()  # type: ignore[arg-type]
    config = engine.opened[0].config
    assert config == SessionConfig(n_ctx=77, chunk=8, kv_type_k="f32", options={"scores": "on"})


@pytest.mark.parametrize(
    ("flash", "asked", "kept"),
    [("on", "q8_0", "f16"), ("auto", "q4_0", "f16"), ("on", "bf16", "bf16"), ("off", "u8", "u8")],
)
def test_values_that_need_flash_attention_are_kept_as_f16(flash: FlashAttention, asked: str, kept: str) -> None:
    engine = ScoringEngine()
    config = replace(CONFIG, flash_attention=flash, kv_type_k="q8_0", kv_type_v=asked)
    open_shadow(engine, config, StoppableClock(ManualClock()), tokens=77).close()  # type: ignore[arg-type]
    opened = engine.opened[0].config
    assert (opened.kv_type_k, opened.kv_type_v, opened.flash_attention) == ("q8_0", kept, "off")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": 101}, "a tape of up to 101 tokens: the model was trained on 100"),
        ({"every": 0}, "a score every 0 queries"),
        ({"options": {"memory": "6GiB"}}, "give --n-ctx instead"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_opened(change: dict[str, Any], says: str) -> None:
    engine = ScoringEngine()
    config = replace(CONFIG, options=change.pop("options", {}))
    with pytest.raises(UsageError, match=says):
        open_shadow(engine, config, StoppableClock(ManualClock()), **{"tokens": 64} | change)  # type: ignore[arg-type]
    assert not engine.opened


def test_an_engine_without_scores_is_refused_and_left_closed() -> None:
    engine = ToyEngine()
    with pytest.raises(UnsupportedOperation, match="dense attention"):
        open_shadow(engine, CONFIG, StoppableClock(ManualClock()), tokens=64)  # type: ignore[arg-type]
    assert engine.opened[0].closed == 1


def test_a_session_with_another_clock_than_its_shadow_is_refused() -> None:
    shadow = Shadow(open_toy(WIDE), StoppableClock(ManualClock()))
    with pytest.raises(UsageError, match="clock"):
        Session(
            open_toy(SCORES), parse_policy("none"), ListSink(), ManualClock(), run_id="r", session_id="s", shadow=shadow
        )


def test_a_windowed_cache_that_cannot_go_back_is_filled_again() -> None:
    world = World(every=4)

    def truncate(stop: int) -> None:
        if stop:
            raise UnsupportedOperation("truncate", "the window has moved on")
        ToyBackend.truncate(world.dense, stop)

    world.dense.truncate = truncate  # type: ignore[method-assign]
    with world.session as session:
        session.ensure_prefix(tokens(8))
        session.ensure_prefix([*tokens(8)[:6], 1])
    assert world.measured[2:] == [(0, 4, True), (4, 6, True), (6, 7, False)]
    assert map_of(world.sink).complete(2, 7)
