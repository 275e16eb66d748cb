"""Slots that fail in a simulated run: what is lost is counted, begun again elsewhere, and in the log."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.clock import ManualClock
from kvtape.backends.session import Session
from kvtape.planner.events import Event, Op
from kvtape.planner.residency import fold
from kvtape.sim.errors import SimulationError
from kvtape.sim.world.failures import SlotFailure, failure_times, parse_slot_failure
from kvtape.sim.world.reading import read_scripts
from kvtape.sim.world.running import Simulated, simulate
from kvtape.sim.world.script import Script
from kvtape.sim.world.settings import Settings
from kvtape.testing.sink import ListSink
from support.simulated import MemoryLog, flat_costs, recorded_toy

POLICY = "stream:sink=4,recent=20,block=8"


def scripts(n: int = 2, turns: int = 3) -> tuple[Script, ...]:
    def play(session: Session) -> None:
        session.ensure_prefix(list(range(20)))
        for turn in range(turns):
            session.decode(4, stop_tokens=frozenset())
            if turn + 1 < turns:
                session.ensure_prefix([*session.tape, 7, 8, turn])

    sinks = []
    for i in range(n):
        clock = ManualClock(1000)
        clock.now_ns()
        sinks.append(recorded_toy(play, POLICY, session_id=f"s{i}", clock=clock))
    return read_scripts(MemoryLog(sinks))


def run(wanted: tuple[Script, ...], *failures: SlotFailure, **settings: object) -> tuple[Simulated, list[Event]]:
    sink = ListSink()
    costs = flat_costs(prefill=100, decode=100)
    made = Settings(arrivals="closed", slot_failures=failures, **settings)  # type: ignore[arg-type]
    return simulate(wanted, made, costs, sinks=[sink]), sink.events


def test_a_turn_that_runs_on_a_failing_slot_begins_again_on_another() -> None:
    whole, _ = run(scripts(1), slots=2)
    first = whole.turns[0]
    at = (first.prompted_ns + first.began_ns) // 2
    found, events = run(scripts(1), SlotFailure(at, 0), slots=2)
    assert found.figures["served"] == 3
    assert (found.figures["slots_failed"], found.figures["lost_turns"], found.figures["lost_caches"]) == (1, 1, 1)
    assert (found.turns[0].lost_turns, found.turns[0].began_ns) == (1, at)
    assert found.turns[0].ttft_ns == at - first.arrived_ns + first.ttft_ns
    (fatal,) = (e for e in events if e.op == Op.FATAL)
    assert (fatal.at_ns, fatal.error_class, fatal.reason) == (at, "device_lost", "slot 0 failed")
    assert {e.session_id for e in events} == {"s0", "s0~2"}


def test_a_cache_that_waits_for_its_next_turn_is_lost_and_prefilled_again() -> None:
    whole, _ = run(scripts(1), slots=2)
    idle = whole.turns[0].ended_ns + 1
    found, events = run(scripts(1), SlotFailure(idle, 0), slots=2)
    assert (found.figures["served"], found.figures["lost_turns"], found.figures["lost_caches"]) == (3, 0, 1)
    assert found.figures["prefilled_tokens"] > whole.figures["prefilled_tokens"]
    (fatal,) = (e for e in events if e.op == Op.FATAL)
    assert fatal.at_ns == idle


def test_with_all_slots_dead_what_is_left_is_unserved_and_says_why() -> None:
    found, _ = run(scripts(2), SlotFailure(2000), SlotFailure(5000), slots=2)
    assert found.figures["unserved"] == found.figures["turns"] == 6
    assert {t.why for t in found.turns} == {"no slot is left: 2 have failed"}
    assert found.figures["lost_turns"] == sum(t.lost_turns for t in found.turns) > 0
    assert found.figures["end_ns"] >= 5000


def test_all_slots_dead_from_the_start_is_an_outcome() -> None:
    found, events = run(scripts(2), SlotFailure(0), slots=1)
    assert found.figures["unserved"] == 6
    assert not [e for e in events if e.op == Op.PREFILL]


def test_a_failure_after_the_end_changes_nothing_but_the_rules() -> None:
    whole, before = run(scripts(2), slots=2)
    late, after = run(scripts(2), SlotFailure(10**15), slots=2)
    assert (whole.figures, whole.turns, before) == (late.figures, late.turns, after)
    assert "1e+06 s" in late.rules["slot_failures"]


def test_a_transfer_over_a_shared_link_ends_before_the_failure_is_seen() -> None:
    settings = {"n_ctx": 32, "cold_tokens": 64, "link_bytes_per_s": 10**6, "slots": 2}
    whole, _ = run(scripts(2), **settings)
    assert whole.figures["link_bytes"]
    found, events = run(scripts(2), SlotFailure(whole.figures["end_ns"] // 2, 0), **settings)
    assert found.figures["served"] + found.figures["unserved"] == 6
    for name in dict.fromkeys(e.session_id for e in events):
        assert fold([e for e in events if e.session_id == name]).closed


@given(st.lists(st.tuples(st.integers(0, 60_000), st.sampled_from([None, 0, 1, 2])), max_size=4), st.booleans())
def test_every_turn_has_one_outcome_and_every_session_folds(
    failures: list[tuple[int, int | None]], affinity: bool
) -> None:
    found, events = run(SCRIPTS, *(SlotFailure(*f) for f in failures), slots=3, affinity=affinity)
    keys = [(t.session_id, t.turn) for t in found.turns]
    assert sorted(keys) == [(f"s{i}", n) for i in range(3) for n in (1, 2, 3)]
    counts = [found.figures[name] for name in ("served", "cut_short", "refused", "unserved")]
    assert sum(counts) == 9
    names = list(dict.fromkeys(e.session_id for e in events))
    for name in names:
        assert fold([e for e in events if e.session_id == name]).closed
    assert sum(e.op == Op.FATAL for e in events) == found.figures["lost_caches"]
    again, twice = run(SCRIPTS, *(SlotFailure(*f) for f in failures), slots=3, affinity=affinity)
    assert (again, twice) == (found, events)


SCRIPTS = scripts(3)


def test_a_schedule_names_each_slot_once() -> None:
    failures = [SlotFailure(9), SlotFailure(5, 1), SlotFailure(7), SlotFailure(8, 1), SlotFailure(20), SlotFailure(30)]
    assert failure_times(failures, 3) == {1: 5, 0: 7, 2: 9}
    with pytest.raises(SimulationError, match="slots 0 to 2"):
        failure_times([SlotFailure(1, 3)], 3)


@pytest.mark.parametrize(
    ("text", "failure"),
    [("0", SlotFailure(0)), ("1.5:2", SlotFailure(1_500_000_000, 2)), ("0.000000001", SlotFailure(1))],
)
def test_a_failure_is_written_as_seconds_and_slot(text: str, failure: SlotFailure) -> None:
    assert parse_slot_failure(text) == failure


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf", "1:", "1:x", "1:-2", "1:2:3"])
def test_what_is_no_failure_is_refused(text: str) -> None:
    with pytest.raises(SimulationError, match="slot failure"):
        parse_slot_failure(text)
