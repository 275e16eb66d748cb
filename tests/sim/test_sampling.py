"""A sample of a simulated run's events: whole conversations, figures over all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.session import Session
from kvtape.planner.residency import fold
from kvtape.sim.errors import SimulationError
from kvtape.sim.world.reading import read_scripts
from kvtape.sim.world.running import simulate
from kvtape.sim.world.sampling import Sample
from kvtape.sim.world.settings import Settings
from kvtape.testing.sink import ListSink
from support.simulated import MemoryLog, flat_costs, recorded_toy


@given(st.sets(st.text(max_size=6), max_size=30), st.floats(0.001, 1), st.integers(0, 2**64 - 1))
def test_a_share_is_rounded_up_and_a_larger_one_has_the_smaller(names: set[str], share: float, seed: int) -> None:
    drawn = Sample(share, None, seed).of(sorted(names))
    assert drawn <= names
    assert len(drawn) >= share * len(names) - 1e-9
    assert len(drawn) < share * len(names) + 1
    assert Sample(share / 2, None, seed).of(sorted(names)) <= drawn
    assert drawn == Sample(share, None, seed).of(sorted(names, reverse=True))
    assert drawn == Sample(None, len(drawn), seed).of(sorted(names)) if drawn else True


def test_seeds_draw_others_and_the_draw_is_the_same_everywhere() -> None:
    names = [f"session-{i}" for i in range(1000)]
    first, second = Sample(0.01, None, 0).of(names), Sample(0.01, None, 1).of(names)
    assert len(first) == len(second) == 10
    assert first != second
    assert sorted(Sample(None, 3).of(names)) == ["session-252", "session-385", "session-963"]


@pytest.mark.parametrize(
    "wrong", [{}, {"share": 0.0}, {"share": 1.1}, {"share": float("nan")}, {"count": 0}, {"share": 0.5, "count": 2}]
)
def test_a_sample_that_is_none_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SimulationError):
        Sample(**wrong)  # type: ignore[arg-type]


def test_figures_are_over_all_and_each_written_session_folds() -> None:
    def play(session: Session) -> None:
        session.ensure_prefix(list(range(20)))
        session.decode(4, stop_tokens=frozenset())
        session.ensure_prefix([*session.tape, 3])

    scripts = read_scripts(MemoryLog([recorded_toy(play, session_id=f"s{i}") for i in range(5)]))
    whole, part = ListSink(), ListSink()
    costs, machine = flat_costs(prefill=10, decode=10), Settings(slots=2, affinity=False)
    every = simulate(scripts, machine, costs, sinks=[whole])
    some = simulate(scripts, machine, costs, sinks=[part], sample=Sample(None, 2))
    assert (every.figures, every.turns) == (some.figures, some.turns)
    drawn = Sample(None, 2).of([s.row.session_id for s in scripts])
    assert {e.session_id.partition("~")[0] for e in part.events} == drawn
    assert part.events == [e for e in whole.events if e.session_id.partition("~")[0] in drawn]
    for name in dict.fromkeys(e.session_id for e in part.events):
        assert fold([e for e in part.events if e.session_id == name]).closed
    assert every.rules["events"] == "all"
    assert some.rules["events"].startswith("of 2 of 5 conversations")
