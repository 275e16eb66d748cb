"""Policies that rank by attention, simulated from recorded dense attention, against the same policies live."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.backends.session import Session
from kvtape.planner.events import Event, Op
from kvtape.planner.rows import PlanRow
from kvtape.sim.costs.model import CostTable
from kvtape.sim.errors import NoAttention, SimulationError
from kvtape.sim.fidelity import first_difference
from kvtape.sim.quality.meter import FIGURES
from kvtape.sim.whatif.grid import points_of
from kvtape.sim.whatif.processes import Processes
from kvtape.sim.whatif.sweep import sweep
from kvtape.sim.world.running import Simulated, simulate
from kvtape.sim.world.script import Script
from kvtape.sim.world.settings import Settings
from kvtape.testing.sink import ListSink
from support.simulated import flat_costs, recorded_toy, scored_script

SCORED = (
    "h2o:budget=32,recent=8,block=4",
    "h2o:budget=32,recent=8,block=4,norm=mean",
    "h2o:budget=32,recent=8,block=4,layers=1,heads=max",
    "snapkv:budget=32,window=4,block=4,layers=all",
    "tova:budget=32,block=4",
)
NONE = "none:block=4"


def talk(session: Session) -> None:
    session.ensure_prefix([(i * 7) % 50 for i in range(27)])
    session.decode(9, stop_tokens=frozenset())
    session.ensure_prefix([*session.tape, *[(i * 5) % 50 for i in range(11)]])
    session.decode(12, stop_tokens=frozenset())


def with_a_side_trip(session: Session) -> None:
    session.ensure_prefix([(i * 3) % 50 for i in range(20)])
    snapshot = session.snapshot()
    session.decode(8, stop_tokens=frozenset())
    session.restore(snapshot)
    session.prefill_suffix([(i * 11) % 50 for i in range(6)])
    session.decode(5, stop_tokens=frozenset())
    session.ensure_prefix([*session.tape[:17], *range(9)])
    session.decode(14, stop_tokens=frozenset())


def run(
    script: Script, policy: str | None = None, n_ctx: int | None = None, costs: CostTable | None = None
) -> tuple[Simulated, ListSink]:
    sink = ListSink()
    settings_ = Settings(policy=policy, n_ctx=n_ctx, arrivals="closed")
    return simulate([script], settings_, costs or flat_costs(), sinks=[sink]), sink


@pytest.mark.parametrize("policy", SCORED)
def test_the_first_plan_is_the_live_one_and_all_before_it(policy: str) -> None:
    """Before anything was evicted the engine's attention is the dense one: what follows from it is the same."""
    live = recorded_toy(talk, policy, n_ctx=64, scores=True, dense_every=1)
    _, simulated = run(scored_script(recorded_toy(talk, NONE, n_ctx=128, dense_every=1)), policy, 64)
    ours, theirs = until_evicted(simulated.events), until_evicted(live.events)
    assert [(e.op, e.start, e.stop, e.resident_digest) for e in ours] == [
        (e.op, e.start, e.stop, e.resident_digest) for e in theirs
    ]
    assert any(e.op == Op.EVICT for e in ours)
    mine, its = decisions(simulated.plans), decisions(live.plans)
    assert mine[0] == its[0]
    assert '"scores_missing"' not in "".join(p.diagnostics for p in simulated.plans)


def until_evicted(events: Sequence[Event]) -> list[Event]:
    """Up to the events of the first plan that evicts, without what a shadow pass wrote."""
    found = []
    for e in events:
        if e.op == Op.SCORE and e.reason == "dense":
            continue
        if found and found[-1].op == Op.EVICT and e.op != Op.EVICT:
            return found
        found.append(e)
    return found


def decisions(plans: Sequence[PlanRow]) -> list[tuple[str, str]]:
    return [(p.keep, p.evict) for p in plans]


def test_the_recorded_policy_repeats_what_a_dense_one_saw() -> None:
    live = recorded_toy(talk, "stream:sink=4,recent=20,block=4", n_ctx=48, dense_every=4)
    found, simulated = run(scored_script(live))
    theirs = [e for e in live.events if not (e.op == Op.SCORE and e.reason == "dense")]
    assert first_difference(theirs, simulated.events) is None
    assert 0 < found.figures["retained_mass_worst"] <= found.figures["retained_mass"] < 1


def test_what_keeps_everything_retains_everything() -> None:
    for play in (talk, with_a_side_trip):
        found, _ = run(scored_script(recorded_toy(play, NONE, n_ctx=128, dense_every=4)))
        assert [found.figures[name] for name in FIGURES] == [1.0, 1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("policy", [*SCORED, "opt:budget=32,block=4", "class:budget=32,block=4"])
@pytest.mark.parametrize("play", [talk, with_a_side_trip])
def test_no_policy_keeps_more_than_the_bound(policy: str, play: object) -> None:
    script = scored_script(recorded_toy(play, NONE, n_ctx=128, dense_every=1))  # type: ignore[arg-type]
    found, sink = run(script, policy, 48)
    figures = found.figures
    assert figures["evicted_tokens"] > 0
    assert 0 < figures["retained_mass_worst"] <= figures["retained_mass"] <= figures["retained_mass_high"] < 1
    assert figures["retained_mass"] <= figures["opt_retained_mass"] <= 1
    assert figures["retained_mass_regret"] == pytest.approx(figures["opt_retained_mass"] - figures["retained_mass"])
    assert {t.mass.queries for t in found.turns if t.mass is not None} == {t_queries(sink, t.turn) for t in found.turns}


def t_queries(sink: ListSink, turn: int) -> int:
    """Queries of a turn of the simulated log that are on the tape at its end."""
    turns, found = 0, set[int]()
    for e in sink.events:
        if e.op == Op.PROMPT:
            turns += 1
        if turns != turn:
            continue
        if e.op in (Op.PREFILL, Op.DECODE):
            found |= set(range(e.start or 0, e.stop or 0))
        elif e.op == Op.TRUNCATE:
            found = {q for q in found if q < (e.start or 0)}
        elif e.op == Op.RESTORE:
            found = {q for q in found if q < (e.resident_tokens or 0)}
    return len(found)


def test_who_knows_what_comes_keeps_more_than_who_draws() -> None:
    script = scored_script(recorded_toy(talk, NONE, n_ctx=128, dense_every=1))
    kept = [
        run(script, f"{p},block=4", 48)[0].figures["retained_mass"]
        for p in ("opt:budget=32", "random:budget=32,seed=1")
    ]
    assert kept[0] > kept[1]


def test_measuring_takes_time_and_knowing_the_future_none() -> None:
    script = scored_script(recorded_toy(talk, NONE, n_ctx=128, dense_every=1))
    costs = flat_costs(score=10)
    _, h2o = run(script, SCORED[0], 48, costs)
    _, window = run(script, SCORED[3], 48, costs)
    _, opt = run(script, "opt:budget=32,block=4", 48, costs)
    took = [{e.elapsed_ns for e in sink.events if e.op == Op.SCORE} for sink in (h2o, window, opt)]
    assert took == [{1000}, {1000 + 4 * 10}, {0}]
    assert {json.loads(e.detail or "{}")["queries"] for e in window.events if e.op == Op.SCORE} == {4}


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("tova:budget=32,block=4", "score-every 1"),
        ("snapkv:budget=32,window=2,block=4", "score-every 2"),
        ("snapkv:budget=32,queries=probe,block=4", "by a probe"),
        ("snapkv:budget=32,window=4,block=4,pool=3", "leave pool out"),
        ("h2o:budget=32,recent=8,block=6", "a multiple of that"),
    ],
)
def test_what_the_recording_cannot_say_is_refused_with_the_remedy(policy: str, said: str) -> None:
    script = scored_script(recorded_toy(talk, NONE, n_ctx=128, dense_every=4))
    with pytest.raises(SimulationError, match=said):
        run(script, policy, 48)


def test_without_a_recording_nothing_is_known_and_scored_policies_are_refused() -> None:
    script = replace(scored_script(recorded_toy(talk, NONE, n_ctx=128, dense_every=4)), attention=None)
    found, _ = run(script, "class:budget=32,block=4", 48)
    assert [found.figures[name] for name in FIGURES] == [None] * len(FIGURES)
    assert any("--score-all" in text for text in found.assumed)
    for policy in ("h2o:budget=32,recent=8,block=4", "opt:budget=32,block=4"):
        with pytest.raises(NoAttention, match="--score-all"):
            run(script, policy, 48)


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 9), st.sampled_from(["stream:sink=2,recent=9", "class:budget=24", "random:budget=24,seed=3"]))
def test_coarser_recordings_give_wider_intervals_around_the_same(every: int, policy: str) -> None:
    exact, coarse = (
        run(scored_script(recorded_toy(talk, f"none:block={b}", n_ctx=128, dense_every=e)), f"{policy},block=4", 32)
        for e, b in ((1, 1), (every, 4))
    )
    truth, found = exact[0].figures, coarse[0].figures
    assert truth["retained_mass_high"] - truth["retained_mass"] < 1e-8
    assert found["retained_mass"] - 1e-6 <= truth["retained_mass"] <= found["retained_mass_high"] + 1e-6


def test_attention_that_was_recorded_is_in_the_rows() -> None:
    axes = {"policy": ["none:block=8", "stream:block=8", "h2o:recent=4,block=8", "opt:block=8"], "budget": [48, 128]}
    points = points_of(axes, Settings(arrivals="closed"))
    script = scored_script(recorded_toy(talk, "none:block=8", n_ctx=128, dense_every=1))
    rows = sweep([script], flat_costs(), points, executor=Processes(2)).rows
    kept = {(r["policy"].split(":")[0], r["budget"]): r["retained_mass"] for r in rows}
    assert kept["none", 128] == kept["h2o", 128] == kept["opt", 128] == 1.0
    assert 0 < kept["h2o", 48] < kept["opt", 48] < 1.0
    assert all(r["opt_retained_mass"] >= r["retained_mass"] for r in rows)
    assert [r["pareto"] for r in rows if r["clairvoyant"]] == [False, False]
    served = [r for r in rows if not r["not_served"]]
    assert len(served) == 7
    assert all(r["prefill_regret_tokens"] >= 0 for r in served)
    assert rows == sweep([script], flat_costs(), points).rows
