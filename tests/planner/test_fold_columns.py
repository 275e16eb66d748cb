"""`fold_columns` beside `apply`: the same state, or the same refusal of the same event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.planner import fold_columns as module
from kvtape.planner.event_columns import EventColumns
from kvtape.planner.events import BlockRef, Event, Op, Way
from kvtape.planner.fold_columns import fold_columns
from kvtape.planner.residency import IllegalEvent, ResidencyState, apply

N_CTX = 40


def one_by_one(events: list[Event], state: ResidencyState | None = None) -> ResidencyState:
    current = state or ResidencyState()
    for event in events:
        current = apply(current, event)
    return current


def outcome(fold: Callable[[], ResidencyState]) -> tuple[str, Any]:
    try:
        state = fold()
    except IllegalEvent as err:
        return "illegal", (str(err), err.event)
    return "state", (state, state.snapshots)


def agree(events: list[Event]) -> tuple[str, Any]:
    found = outcome(lambda: fold_columns(EventColumns.of(events)))
    assert found == outcome(lambda: one_by_one(events))
    return found


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """Legal sessions, mostly runs of decodes, with prompts, remarks, evictions and truncations between."""
    events: list[Event] = []
    state = ResidencyState()

    def feed(op: Op, **columns: Any) -> None:
        nonlocal state
        turn = state.turn + (op is Op.PROMPT and columns.get("reason") != "suffix")
        generation = state.generation + (op in (Op.TRUNCATE, Op.RESTORE))
        event = Event(
            run_id="r",
            session_id="s",
            seq=state.next_seq,
            at_ns=0,
            op=op,
            turn=turn,
            generation=generation,
            **columns,
        )
        state = apply(state, event)
        events.append(event)

    feed(Op.OPEN, n_tokens=N_CTX)

    def slide(where: int, n: int) -> None:
        """The first rows of the cache's last segment go, in the rebased way the rest moves up to the gap."""
        last = state.layout[-1]
        start, n = last.tape_start, min(n, last.length)
        named = last.cache_start if where % 4 else None
        way = Way.REBASED if where % 3 == 0 else Way.GAP
        feed(Op.EVICT, start=start, stop=start + n, n_tokens=n, cache_start=named, way=way)
        if way is Way.REBASED and n < last.length:
            whole = {"start": last.cache_start + n, "stop": last.cache_stop, "n_tokens": last.length - n}
            feed(Op.SHIFT, **whole if where % 5 else whole | {"n_tokens": None}, delta=-n)

    steps = st.tuples(st.sampled_from("ddddwwwwpgrrsetx"), st.integers(0, 63), st.integers(1, 6))
    for step, where, n in draw(st.lists(steps, max_size=40)):
        n = min(n, N_CTX - state.resident_tokens)
        if step == "w" and state.layout:
            slide(where, 1 + n // 3)
            n = min(1, N_CTX - state.resident_tokens)
        if step in "dpw" and n > 0:
            feed(
                Op.PREFILL if step == "p" else Op.DECODE,
                start=state.tape_length,
                stop=state.tape_length + n,
                n_tokens=n if where % 2 else None,
                cache_start=state.next_cache_position,
            )
        elif step == "g":
            feed(draw(st.sampled_from([Op.GENERATE, Op.SCORE, Op.PLAN, Op.REFUSE])))
        elif step == "r":
            suffix = where % 3 == 0
            start = state.tape_length if suffix else where % (state.tape_length + 1)
            feed(Op.PROMPT, start=start, n_tokens=start + n, reason="suffix" if suffix else None)
        elif step == "s" and len(state.snapshots) < 2:
            feed(Op.SNAPSHOT, snapshot_id=len(state.snapshots))
        elif step == "e" and state.layout:
            run = state.layout[where % len(state.layout)]
            length = min(n + 1, run.length)
            feed(Op.EVICT, start=run.tape_start, stop=run.tape_start + length, way=draw(st.sampled_from(list(Way)[:3])))
        elif step == "t":
            feed(Op.TRUNCATE, start=where % (state.tape_length + 1))
        elif step == "x" and state.snapshots:
            feed(Op.RESTORE, snapshot_id=where % len(state.snapshots))
    ending = draw(st.sampled_from([None, Op.FATAL, Op.CLOSE, Op.LOST]))
    if ending is not None:
        feed(ending, error_class="decode_failed")
    if ending is Op.FATAL:
        feed(Op.REFUSE)
    return events


@given(logs(), st.data())
def test_columns_fold_as_events_do(events: list[Event], data: st.DataObject) -> None:
    assert agree(events)[0] == "state"
    cut = data.draw(st.integers(0, len(events)))
    before = one_by_one(events[:cut])
    assert fold_columns(EventColumns.of(events[cut:]), before) == one_by_one(events)


FIELDS = ("seq", "turn", "generation", "start", "stop", "n_tokens", "cache_start", "delta")


@given(logs(), st.integers(0, 99), st.sampled_from(FIELDS), st.sampled_from([-2, -1, 1, 2, 41, 2**62, 2**64, None]))
def test_one_wrong_number_is_refused_by_name(events: list[Event], where: int, name: str, off: int | None) -> None:
    index = where % len(events)
    old = getattr(events[index], name)
    if off is None and name in FIELDS[:3]:
        return
    agree(
        [
            *events[:index],
            replace(events[index], **{name: None if off is None else (old or 0) + off}),
            *events[index + 1 :],
        ]
    )


@given(logs(), st.integers(0, 99), st.sampled_from(["lost", "again", "swapped", "other op"]), st.sampled_from(list(Op)))
def test_a_log_with_rows_out_of_place(events: list[Event], where: int, how: str, op: Op) -> None:
    i = where % len(events)
    agree(
        {
            "lost": events[:i] + events[i + 1 :],
            "again": events[: i + 1] + events[i:],
            "swapped": events[:i] + events[i : i + 2][::-1] + events[i + 2 :],
            "other op": [*events[:i], replace(events[i], op=op), *events[i + 1 :]],
        }[how]
    )


def session(*lengths: int) -> list[Event]:
    """An open event and decodes of these lengths."""
    events = [Event(run_id="r", session_id="s", seq=0, at_ns=0, op=Op.OPEN, turn=0, generation=0, n_tokens=100)]
    at = 0
    for n in lengths:
        events.append(
            replace(events[0], seq=len(events), op=Op.DECODE, start=at, stop=at + n, n_tokens=n, cache_start=at)
        )
        at += n
    return events


class Counted:
    """`apply`, with a list of what it was asked."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def __call__(self, state: ResidencyState, event: Event) -> ResidencyState:
        self.ops.append(event.op)
        return apply(state, event)


def test_a_run_of_decodes_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "apply", counted := Counted())
    events = session(*[1] * 99)
    assert fold_columns(EventColumns.of(events)) == one_by_one(events)
    assert counted.ops == [Op.OPEN]


def window(n_events: int, sink: int = 4, size: int = 20, rebased: bool = False) -> list[Event]:
    """A full cache that slides: each token is a plan, an evict (rebased: and a shift), and a decode."""
    events = session(sink + size)
    first, tape = sink, sink + size
    cache = tape

    def add(op: Op, **columns: Any) -> None:
        events.append(replace(events[0], seq=len(events), op=op, **{"n_tokens": None} | columns))

    while len(events) < n_events:
        at = sink if rebased else first
        add(Op.PLAN)
        add(Op.EVICT, start=first, stop=first + 1, cache_start=at, way=Way.REBASED if rebased else Way.GAP)
        if rebased:
            add(Op.SHIFT, start=at + 1, stop=cache, delta=-1)
            cache -= 1
        add(Op.DECODE, start=tape, stop=tape + 1, cache_start=cache)
        first, tape, cache = first + 1, tape + 1, cache + 1
    return events


@pytest.mark.parametrize("rebased", [False, True])
def test_a_window_that_slides_is_one_step(rebased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long: only the session's beginning and the evict that opens the gap go one by one."""
    events = window(1_000, rebased=rebased)
    state = one_by_one(events)
    assert (len(state.layout), state.resident_tokens) == (2, 24)
    monkeypatch.setattr(module, "apply", counted := Counted())
    assert fold_columns(EventColumns.of(events)) == state
    assert counted.ops == [Op.OPEN, Op.EVICT]


@pytest.mark.parametrize("rebased", [False, True])
@pytest.mark.parametrize("column", ["start", "stop", "cache_start", "delta", "n_tokens"])
@pytest.mark.parametrize("off", [-1, 1])
def test_one_wrong_number_in_a_window_is_refused_by_name(rebased: bool, column: str, off: int) -> None:
    events = window(40, rebased=rebased)
    for i in range(20, 25):
        if getattr(events[i], column) is not None:
            wrong = [*events[:i], replace(events[i], **{column: getattr(events[i], column) + off}), *events[i + 1 :]]
            # A shift that names more of the cache than its rows moves the same rows.
            wider = events[i].op is Op.SHIFT and (column, off) in (("start", -1), ("stop", 1))
            assert agree(wrong)[0] == ("state" if wider else "illegal")


def test_a_window_that_takes_all_its_rows_or_cold_ones_goes_one_by_one() -> None:
    events = window(11, size=3)
    cold = replace(events[6], cold=True, blocks=(BlockRef(7, 5, 6),))
    assert events[6].op is Op.EVICT
    assert agree([*events[:6], cold, *events[7:]])[1][0].cold
    emptied = [*events, replace(events[6], seq=len(events), start=7, stop=10, cache_start=7)]
    assert agree(emptied)[1][0].resident_tokens == 4


def test_the_event_that_overflows_is_the_one_that_is_named() -> None:
    events = session(50, 40, 9, 2, 1)
    with pytest.raises(IllegalEvent, match=r"seq 4 .* 101 tokens resident in a context of 100") as caught:
        fold_columns(EventColumns.of(events))
    assert caught.value.event is events[4]


def test_no_events_leave_the_state() -> None:
    state = one_by_one(session(3))
    assert fold_columns(EventColumns.of([]), state) is state
    assert fold_columns(EventColumns.of([])) == ResidencyState()


def test_rows_are_asked_for_only_where_they_are_needed() -> None:
    """Columns may come straight out of a table: nothing else of a decode is read."""
    columns = EventColumns.of(session(*[2] * 40))

    def row(i: int) -> Event:
        assert i == 0
        return session()[0]

    assert fold_columns(replace(columns, event=row)).tape_length == 80
    assert columns.op.dtype == np.int64


def chat() -> list[Event]:
    """Two turns and a suffix in one run: the tape is 6 long at seq 3, 9 at seq 5, 12 at the end."""
    (opening,) = session()
    steps: tuple[dict[str, Any], ...] = (
        {"op": Op.PROMPT, "start": 0, "n_tokens": 6, "turn": 1},
        {"op": Op.PREFILL, "start": 0, "stop": 6, "cache_start": 0, "turn": 1},
        {"op": Op.PROMPT, "start": 6, "n_tokens": 9, "turn": 2},
        {"op": Op.PREFILL, "start": 6, "stop": 9, "cache_start": 6, "turn": 2},
        {"op": Op.PROMPT, "start": 9, "n_tokens": 3, "turn": 2, "reason": "suffix"},
        {"op": Op.DECODE, "start": 9, "stop": 12, "cache_start": 9, "turn": 2},
    )
    return [opening, *(replace(opening, seq=i, **({"n_tokens": None} | s)) for i, s in enumerate(steps, start=1))]


def test_turns_are_part_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    events = chat()
    state = one_by_one(events)
    assert (state.turn, state.prefix_length, state.tape_length) == (2, 9, 12)
    before = one_by_one(events[:1])
    monkeypatch.setattr(module, "apply", None)
    assert fold_columns(EventColumns.of(events[1:]), before) == state


@pytest.mark.parametrize(
    ("seq", "wrong", "why"),
    [
        (1, {"start": 1}, "past the tape"),
        (3, {"start": 7}, "past the tape"),
        (3, {"n_tokens": 5}, "longer than the prompt"),
        (3, {"n_tokens": None}, "needs start and n_tokens"),
        (3, {"start": None}, "needs start and n_tokens"),
        (3, {"turn": 1}, "expected turn 2"),
        (3, {"turn": 3}, "expected turn 2"),
        (3, {"generation": 1}, "expected generation 0"),
        (5, {"start": 8}, "a suffix starts at the end"),
        (5, {"start": 10}, "past the tape"),
        (5, {"turn": 3}, "expected turn 2"),
        (6, {"turn": 1}, "expected turn 2"),
        (6, {"cache_start": 10}, "expected 9"),
        (6, {"start": 10}, "the tape ends at 9"),
    ],
)
def test_a_run_with_one_wrong_row_is_refused_there(seq: int, wrong: dict[str, Any], why: str) -> None:
    events = chat()
    events[seq] = replace(events[seq], **wrong)
    kind, (message, at) = agree(events)
    assert kind == "illegal"
    assert why in message
    assert at is events[seq]
