"""The modelled backend: a session over it decides and records what it does on an engine with real rows."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import (
    Cancelled,
    ContextOverflow,
    InputRejected,
    KvtapeError,
    StateRejected,
    UnsupportedOperation,
)
from kvtape.backends.modelled.backend import ModelledBackend
from kvtape.backends.modelled.blob import pack, unpack
from kvtape.backends.modelled.clock import VirtualTimeline
from kvtape.backends.modelled.shape import Shape
from kvtape.backends.modelled.work import Work
from kvtape.backends.protocol import Backend, ModelFacts, SessionConfig
from kvtape.backends.session import Session
from kvtape.backends.speculation.spec import parse_speculation
from kvtape.planner.events import Placement
from kvtape.planner.layout import Segment
from kvtape.planner.ranges import RangeSet
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink
from kvtape.testing.toy import TOY_CAPABILITIES, open_toy

CONFIG = SessionConfig(n_ctx=64, chunk=8, cold_budget_tokens=40)
NO_LOGITS = np.empty(0, np.float32)


class Priced:
    """One nanosecond a token and 10 a call; keeps what was asked."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def cost_ns(self, work: Work) -> int:
        self.works.append(work)
        return 10 + work.tokens


def modelled(**changes: bool) -> tuple[ModelledBackend, Priced, VirtualTimeline]:
    facts = ModelFacts("toy", "toy/1", "toy", 1 << 20, 1 << 20, frozenset())
    shape = Shape(facts, CONFIG, CONFIG.n_ctx, dataclasses.replace(TOY_CAPABILITIES, **changes), 7, "toy")
    costs, timeline = Priced(), VirtualTimeline()
    return ModelledBackend(shape, costs, timeline), costs, timeline


def session_on(backend: Backend, policy: str, speculation: str | None = None) -> tuple[Session, ListSink]:
    sink = ListSink()
    drafts = None if speculation is None else parse_speculation(speculation)
    opened = Session(backend, parse_policy(policy), sink, ManualClock(), run_id="r", session_id="s", speculation=drafts)
    return opened, sink


POLICIES = (
    "none:block=8",
    "stream:sink=4,recent=20,block=8",
    "stream:sink=4,recent=20,block=8,positions=rebased",
    "stream:sink=4,recent=20,block=8,hole=refill",
    "class:budget=40,block=8",
    "random:budget=40,seed=3,block=8",
)

CALLS = st.one_of(
    st.tuples(st.just("prefix"), st.integers(0, 60), st.integers(1, 50)),
    st.tuples(st.just("suffix"), st.integers(1, 30)),
    st.tuples(st.just("decode"), st.integers(1, 40)),
    st.tuples(st.just("evict"), st.integers(0, 50), st.integers(1, 12)),
    st.tuples(st.just("admit"), st.integers(0, 12), st.booleans()),
    st.tuples(st.just("compact")),
    st.tuples(st.just("snapshot")),
    st.tuples(st.just("restore"), st.integers(0, 2)),
    st.tuples(st.just("plan"), st.integers(2, 60)),
)


def carry_out(session: Session, call: tuple[Any, ...], number: int) -> None:
    fresh = [(number * 101 + i) % 50 for i in range(64)]
    name, *args = call
    with suppress(KvtapeError):
        if name == "prefix":
            session.ensure_prefix([*session.tape[: args[0]], *fresh[: args[1]]])
        elif name == "suffix":
            session.prefill_suffix(fresh[: args[0]])
        elif name == "decode":
            tokens = iter(fresh)
            session.decode(args[0], choose=lambda _: next(tokens), stop_tokens=frozenset())
        elif name == "evict":
            session.evict(args[0], args[0] + args[1])
        elif name == "admit":
            session.admit(args[0], Placement.IN_PLACE if args[1] else Placement.APPEND)
        elif name == "compact":
            session.compact()
        elif name == "snapshot":
            session.snapshot()
        elif name == "restore":
            session.restore(args[0])
        elif name == "plan":
            session.plan_now(args[0])


def told(sink: ListSink) -> list[Any]:
    """The events, without times, sizes of states and the engine's name in the text of a refusal."""
    blank = {"at_ns": 0, "elapsed_ns": None, "kv_bytes": None, "detail": None}
    out = []
    for e in sink.events:
        words = (e.reason or "").split(":")[0] if e.op == "refuse" else e.reason
        out.append(dataclasses.replace(e, **blank, reason=words))
    return out


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    calls=st.lists(CALLS, min_size=1, max_size=14),
    speculation=st.sampled_from([None, "lookup:ngram=1,tokens=5"]),
)
def test_a_session_over_it_records_what_it_records_over_real_rows(
    policy: str, calls: list[tuple[Any, ...]], speculation: str | None
) -> None:
    toy, toy_sink = session_on(open_toy(CONFIG), policy, speculation)
    model, model_sink = session_on(modelled()[0], policy, speculation)
    for number, call in enumerate([("prefix", 0, 40), *calls]):
        carry_out(toy, call, number)
        carry_out(model, call, number)
        assert told(model_sink) == told(toy_sink)
        assert model.tape == toy.tape


def test_a_decode_is_one_piece_of_work_however_long() -> None:
    backend, costs, timeline = modelled()
    backend.prefill([1, 2, 3], 0)
    before = timeline.now_ns()
    run = backend.decode_until(40, 64, 3, NO_LOGITS, lambda _: 5)
    assert (run.tokens, run.stopped) == ((5,) * 40, "n")
    assert timeline.now_ns() - before == 50
    assert costs.works[-1] == Work("decode", 40, 3)


def test_drafts_cost_a_prefill_of_all_and_a_cut_of_those_that_go() -> None:
    backend, costs, timeline = modelled()
    backend.prefill([1, 2, 3], 0)
    before, paid = timeline.now_ns(), len(costs.works)
    done = backend.verify([4, 5, 6, 7], 3, lambda each: len(each) - 3)
    assert (done.kept, done.calls, backend.books()) == (1, 1, (Segment(0, 4, 0),))
    assert [(w.kind, w.tokens) for w in costs.works[paid:]] == [("prefill", 4), ("truncate", 3)]
    assert timeline.now_ns() - before == (10 + 4) + (10 + 3)
    done = backend.verify([5, 6], 4, len)
    assert (done.kept, backend.books()) == (2, (Segment(0, 6, 0),))
    assert [(w.kind, w.tokens) for w in costs.works[paid + 2 :]] == [("prefill", 2)]
    taken = timeline.now_ns()
    for tokens, keep in (([1] * 9, len), ([1], lambda _: 2), ([], len)):
        with pytest.raises(InputRejected):
            backend.verify(tokens, 6, keep)  # type: ignore[arg-type]
    backend.cancel()
    with pytest.raises(Cancelled):
        backend.verify([1], 6, len)
    with pytest.raises(UnsupportedOperation, match="remove_tail is false"):
        modelled(remove_tail=False)[0].verify([1], 0, len)
    assert (timeline.now_ns(), backend.books()) == (taken, (Segment(0, 6, 0),))


def test_a_decode_ends_at_the_limit_or_when_nothing_is_chosen() -> None:
    backend, _, _ = modelled()
    backend.prefill([1, 2, 3], 0)
    assert backend.decode_until(9, 6, 3, NO_LOGITS, lambda _: 5).stopped == "limit"
    tokens = iter([7])
    run = backend.decode_until(9, 60, 6, NO_LOGITS, lambda _: next(tokens, None))
    assert (run.tokens, run.stopped) == ((7,), "chosen_none")


def test_the_next_computation_pays_for_a_pending_shift_once() -> None:
    backend, costs, _ = modelled()
    backend.prefill(list(range(12)), 0)
    backend.evict(2, 6)
    backend.shift(6, 12, -4)
    backend.prefill([1], 12)
    backend.prefill([1], 13)
    assert [w.turned for w in costs.works if w.kind == "prefill"] == [0, 6, 0]


def test_blocks_and_snapshots_say_the_size_of_what_they_stand_for() -> None:
    backend, costs, _ = modelled()
    backend.prefill(list(range(12)), 0)
    block, whole = backend.export_block(4, 8), backend.snapshot()
    assert (len(block), len(whole)) == (4 * 7, 12 * 7)
    assert [w.n_bytes for w in costs.works[-2:]] == [28, 84]
    backend.evict(4, 8)
    backend.admit(block, 4, 4)
    assert backend.books() == (Segment(0, 12, 0),)
    assert backend.kv_bytes() == {"resident": 84, "allocated": 64 * 7}


def test_a_foreign_state_is_rejected() -> None:
    with pytest.raises(StateRejected):
        unpack("snapshot", pack("block", (), 10))
    with pytest.raises(StateRejected):
        unpack("block", b"nonsense")


def test_what_is_refused_takes_no_time_and_changes_nothing() -> None:
    backend, _, timeline = modelled(remove_middle=False, snapshot_state=False)
    backend.prefill(list(range(60)), 0)
    before = timeline.now_ns(), backend.books()
    for call in (
        lambda: backend.prefill([1] * 5, 60),
        lambda: backend.prefill([-1], 60),
        lambda: backend.prefill([], 60),
        lambda: backend.evict(0, 4),
        lambda: backend.snapshot(),
        lambda: backend.shift(0, 4, -1),
        lambda: backend.rebuild(RangeSet([(0, 3)]), [1]),
        lambda: backend.witness(),
        lambda: backend.take_mass(),
        lambda: backend.decode_until(-1, 64, 60, NO_LOGITS, lambda _: 1),
    ):
        with pytest.raises((ContextOverflow, InputRejected, UnsupportedOperation)):
            call()
    assert (timeline.now_ns(), backend.books()) == before
    assert "remove_middle" in (backend.refusal("remove_middle") or "")


def test_a_cancel_stops_the_next_computation_alone() -> None:
    backend, _, _ = modelled()
    backend.cancel()
    with pytest.raises(Cancelled):
        backend.prefill([1], 0)
    assert backend.prefill([1], 0).tokens == 1
