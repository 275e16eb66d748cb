"""How a session ends, and what an operation leaves that failed, was cancelled, or came while another ran."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import (
    Cancelled,
    ChoiceFailed,
    ContextOverflow,
    SessionBusy,
    SessionClosed,
    SessionFatal,
)
from kvtape.backends.session import Session
from kvtape.planner.events import Event, Op
from kvtape.planner.residency import fold
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink
from kvtape.traces.errors import LogWriteFailed
from support.toys import ops, toy_backend, toy_session


def test_fatal_keeps_the_first_cause_and_closes_the_context_once() -> None:
    session, toy, sink = toy_session()
    session.ensure_prefix([1, 2, 3])
    toy.faults = {"decode"}
    with pytest.raises(SessionFatal, match="planted in decode"):
        session.decode(3)
    calls = len(toy.operations)
    for later in (lambda: session.decode(1), lambda: session.ensure_prefix([1]), session.snapshot):
        with pytest.raises(SessionFatal, match="planted in decode") as caught:
            later()
        assert str(caught.value).count("decode_failed") == 1
    assert (sink.events[-1].error_class, sink.events[-1].reason) == ("decode_failed", "planted in decode")
    assert len(toy.operations) == calls
    session.close()
    assert [str(e.op) for e in sink.events[-2:]] == ["fatal", "close"]
    assert session.explain().fatal == "decode_failed: planted in decode"


def test_an_exception_nobody_planned_is_fatal_too() -> None:
    session, toy, _ = toy_session()
    toy.prefill = lambda tokens, tape_start: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(SessionFatal, match="ZeroDivisionError"):
        session.ensure_prefix([1, 2])


def test_plain_close_is_not_fatal() -> None:
    session, _, _ = toy_session()
    session.close()
    session.close()
    with pytest.raises(SessionClosed):
        session.decode(1)


def test_cancel_rolls_back_to_the_start_of_the_operation() -> None:
    session, toy, sink = toy_session(n_ctx=128)
    session.ensure_prefix(list(range(10)))
    toy.cancel_after = 2
    with pytest.raises(Cancelled):
        session.prefill_suffix([i % 60 for i in range(60)])
    assert session.tape == tuple(range(10))
    assert len(toy.rows) == 10
    assert [e.reason for e in sink.events if e.op is Op.TRUNCATE] == ["cancelled"]
    session.prefill_suffix([5])


def test_what_a_failing_choice_had_decoded_is_taken_back_and_the_session_goes_on() -> None:
    session, ledger, sink = toy_session(n_ctx=256)
    session.ensure_prefix([1, 2, 3])
    left = iter(range(40))

    with pytest.raises(ChoiceFailed, match="StopIteration"):
        session.decode(60, choose=lambda _: next(left))
    assert session.tape == (1, 2, 3)
    assert len(ledger.rows) == 3
    assert [str(e.op) for e in sink.events[-2:]] == ["truncate", "refuse"]
    assert len(session.decode(5).tokens) == 5


def test_what_was_taken_back_does_not_hurry_the_next_plan() -> None:
    """`every` counts tokens that stay: a session that cancelled plans where one does that never tried."""
    planned = []
    for tries in (0, 2):
        session, _, sink = toy_session("class:budget=20,every=5,block=4", n_ctx=64)
        session.ensure_prefix([*range(20)])
        session.decode(1, stop_tokens=frozenset())
        for _ in range(tries):
            left = iter(range(3))
            with pytest.raises(ChoiceFailed):
                session.decode(9, choose=lambda _, left=left: next(left))  # type: ignore[misc]
        session.decode(12, stop_tokens=frozenset())
        planned.append([p.total_tokens for p in sink.plans])
    assert planned[0] == planned[1]
    assert len(planned[0]) > 1


def test_cancel_of_a_sliding_prefill_closes_the_session_without_a_fatal() -> None:
    session, toy, sink = toy_session("stream:sink=2,recent=10", n_ctx=32)
    toy.cancel_after = 4
    with pytest.raises(Cancelled):
        session.ensure_prefix([i % 60 for i in range(200)])
    with pytest.raises(SessionClosed):
        session.decode(1)
    assert sink.events[-1].op is Op.CLOSE


def test_an_overflow_half_way_takes_back_what_went_in() -> None:
    """Whole blocks at both borders of a policy that does not split fill the context, which only shows on the way."""
    session, ledger, sink = toy_session("stream:sink=1,recent=30,split=no", n_ctx=64, chunk=8)
    session.ensure_prefix([1, 2, 3])
    before = session.tape
    with pytest.raises(ContextOverflow, match="protected part"):
        session.prefill_suffix([i % 60 for i in range(200)])
    assert session.tape == before
    assert len(ledger.rows) == 3
    assert [e.reason for e in sink.events if e.op is Op.TRUNCATE] == ["overflow"]
    assert fold(sink.events).tape_length == 3


class FullDisk(ListSink):
    """From `full` on nothing can be written."""

    full = False

    def record(self, event: Event, **rest: object) -> None:  # type: ignore[override]
        if self.full:
            raise LogWriteFailed("disk full")
        super().record(event, **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["close", "refusal", "fatal", "work"])
def test_a_log_that_cannot_be_written_frees_the_native_context(how: str) -> None:
    ledger, sink = toy_backend(), FullDisk()
    session = Session(ledger, parse_policy("none"), sink, ManualClock(), run_id="r", session_id="s")
    session.ensure_prefix([1, 2, 3])
    if how == "fatal":
        ledger.faults = {"snapshot"}
    sink.full = True
    act = {
        "close": session.close,
        "refusal": lambda: session.ensure_prefix([-1]),
        "fatal": session.snapshot,
        "work": lambda: session.decode(1),
    }[how]
    with pytest.raises(LogWriteFailed):
        act()
    assert ledger.closed
    with pytest.raises((SessionClosed, SessionFatal)):
        session.decode(1)


@pytest.mark.parametrize(
    "act",
    [
        lambda s: s.evict(1, 2),
        lambda s: s.prefill_suffix([5]),
        lambda s: s.decode(1),
        lambda s: s.snapshot(),
        lambda s: s.close(),
    ],
)
def test_an_operation_from_inside_another_is_refused(act) -> None:
    session, ledger, sink = toy_session()
    session.ensure_prefix([1, 2, 3, 4])
    with pytest.raises(ChoiceFailed, match="SessionBusy"):
        session.decode(3, choose=lambda logits: act(session) or 5)
    assert session.tape == (1, 2, 3, 4)
    assert fold(sink.events).layout == ledger.books()
    session.decode(1)


def test_a_second_thread_is_refused_and_closing_waits_for_the_first() -> None:
    session, ledger, sink = toy_session()
    session.ensure_prefix([1, 2, 3])
    running, go_on, cancelled = threading.Event(), threading.Event(), threading.Event()
    ledger.cancel = lambda: (cancelled.set(), go_on.set())  # type: ignore[method-assign, assignment, return-value]

    def choose(logits: object) -> int:
        running.set()
        assert go_on.wait(10)
        return 5

    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(session.decode, 2, choose=choose)
        assert running.wait(10)
        for act in (lambda: session.evict(0, 1), lambda: session.decode(1), session.snapshot):
            with pytest.raises(SessionBusy, match="another thread"):
                act()
        assert ledger.closed == 0
        session.close()
        assert decoding.result(10).tokens == (5, 5)
    assert cancelled.is_set()
    assert ops(sink)[-2:] == ["decode", "close"]
    assert ledger.closed == 1


@pytest.mark.parametrize("after", range(1, 5))
def test_ctrl_c_between_any_two_steps_closes_the_session(after: int) -> None:
    """The engine has worked and the event is not written yet: going on would be another story than the log's."""

    class Struck(ManualClock):
        left = 1 << 30

        def now_ns(self) -> int:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return super().now_ns()

    ledger, sink, clock = toy_backend(), ListSink(), Struck()
    session = Session(ledger, parse_policy("none"), sink, clock, run_id="r", session_id="s")
    session.ensure_prefix([1, 2, 3, 4])
    clock.left = after
    with pytest.raises(KeyboardInterrupt):
        session.ensure_prefix([1, 2, 5, 6])
    assert ledger.closed == 1
    with pytest.raises(SessionClosed):
        session.decode(1)
    assert (ops(sink)[-1], sink.events[-1].reason) == ("close", "interrupted")
    assert fold(sink.events).closed


def test_a_session_whose_device_is_lost_between_two_calls_says_so_once() -> None:
    session, toy, sink = toy_session()
    session.ensure_prefix([1, 2, 3])
    session.lose("slot 3 failed")
    session.lose("again")
    with pytest.raises(SessionFatal, match="slot 3 failed"):
        session.decode(1)
    session.close()
    assert ops(sink)[-2:] == ["fatal", "close"]
    assert (sink.events[-2].error_class, sink.events[-2].reason) == ("device_lost", "slot 3 failed")
    assert fold(sink.events).fatal == "device_lost"
    assert toy.closed == 1
    session.lose("too late")
    assert ops(sink)[-1] == "close"
