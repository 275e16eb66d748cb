"""A prefix in steps: the log of `ensure_prefix`, and a whole operation for everybody who comes in a pause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvtape.backends.errors import Cancelled, SessionBusy, SessionClosed
from kvtape.backends.session import PrefixStatus, Session
from kvtape.planner.events import Event, Op
from support.toys import POLICIES, toy_session

FIRST, LONG = list(range(40)), [i % 50 for i in range(300)]


def _stepped(session: Session, prompt: list[int]) -> tuple[PrefixStatus, int]:
    steps, pauses = session.prefix_steps(prompt), 0
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            return ended.value, pauses
        pauses += 1


def _without_times(events: list[Event]) -> list[Event]:
    return [replace(e, at_ns=0, elapsed_ns=None) for e in events]


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_leave_the_log_of_the_whole(policy: str) -> None:
    (whole, _, told), (stepped, toy, sink) = (toy_session(policy, n_ctx=400) for _ in range(2))
    for prompt in (FIRST, LONG, LONG[:100], LONG):
        before = len(sink.events)
        status, pauses = _stepped(stepped, prompt)
        assert status == whole.ensure_prefix(prompt)
        assert pauses >= sum(e.op is Op.PREFILL for e in sink.events[before:]) - 1
        assert stepped.decode(3).tokens == whole.decode(3).tokens
    assert _without_times(sink.events) == _without_times(told.events)
    assert max(e.n_tokens or 0 for e in sink.events if e.op is Op.PREFILL) <= toy.config.chunk


def test_in_a_pause_the_session_is_taken() -> None:
    session, _, sink = toy_session(n_ctx=400)
    steps = session.prefix_steps(LONG)
    next(steps)
    calls: tuple[Callable[[], object], ...] = (lambda: session.decode(1), lambda: session.ensure_prefix(FIRST))
    for call in calls:
        recorded = len(sink.events)
        with pytest.raises(SessionBusy):
            call()
        assert len(sink.events) == recorded
    assert list(steps)
    assert session.tape == tuple(LONG)
    session.decode(1)


def test_a_cancel_in_a_pause_takes_all_steps_back() -> None:
    session, toy, sink = toy_session(n_ctx=400)
    session.ensure_prefix(FIRST)
    steps = session.prefix_steps([*FIRST, *LONG])
    next(steps)
    next(steps)
    session.cancel()
    with pytest.raises(Cancelled):
        next(steps)
    assert session.tape == tuple(FIRST)
    assert len(toy.rows) == len(FIRST)
    assert [str(e.op) for e in sink.events[-2:]] == ["truncate", "refuse"]
    assert _stepped(session, [*FIRST, *LONG])[0].reused == len(FIRST)


def test_steps_that_are_left_end_the_session() -> None:
    session, _, sink = toy_session(n_ctx=400)
    steps = session.prefix_steps(LONG)
    next(steps)
    steps.close()
    assert (sink.events[-1].op, sink.events[-1].reason) == (Op.CLOSE, "interrupted")
    with pytest.raises(SessionClosed):
        session.decode(1)
