"""The simulated world: who waits for what, what is lost with a slot, and that nothing hangs or goes unsaid."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from fractions import Fraction
from typing import Any

import pytest
import simpy

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import UnsupportedOperation
from kvtape.backends.session import Session
from kvtape.planner.events import Op
from kvtape.planner.residency import fold
from kvtape.planner.specs import SpecError
from kvtape.sim.costs.model import CostTable, KindCosts
from kvtape.sim.errors import CostsError, SimulationError, Stalled, WorkloadError
from kvtape.sim.fidelity import first_difference
from kvtape.sim.world import running
from kvtape.sim.world.reading import read_scripts
from kvtape.sim.world.running import Simulated, simulate
from kvtape.sim.world.script import Script
from kvtape.sim.world.server import Server
from kvtape.sim.world.settings import Settings
from kvtape.sim.world.timeline import Link, SimTimeline
from kvtape.testing.sink import ListSink
from support.logs import event, session_row
from support.simulated import MemoryLog, flat_costs, recorded_toy

NONE = "none:block=8"


def talk(turns: int = 3, first: int = 20, more: int = 6, decode: int = 4) -> object:
    def play(session: Session) -> None:
        session.ensure_prefix([i % 50 for i in range(first)])
        for turn in range(turns):
            session.decode(decode, stop_tokens=frozenset())
            if turn + 1 < turns:
                session.ensure_prefix([*session.tape, *[(turn + i) % 50 for i in range(more)]])

    return play


def scripts_of(*names: str, policy: str = NONE, start: Sequence[int] = (), **more: object) -> tuple[Script, ...]:
    sinks = []
    for i, name in enumerate(names):
        clock = ManualClock(1000)
        clock._now = start[i] if start else 0
        sinks.append(recorded_toy(talk(), policy, session_id=name, clock=clock, **more))  # type: ignore[arg-type]
    return read_scripts(MemoryLog(sinks))


def run(scripts: Sequence[Script], costs: CostTable | None = None, **settings: object) -> tuple[Simulated, ListSink]:
    sink = ListSink()
    found = simulate(scripts, Settings(**settings), costs or flat_costs(prefill=10, decode=100), sinks=[sink])  # type: ignore[arg-type]
    return found, sink


def test_a_turn_takes_what_its_operations_cost() -> None:
    scripts = scripts_of("a")
    found, _ = run(scripts, arrivals="closed")
    first = found.turns[0]
    # 20 tokens in pieces of 8, 8 and 4, then 4 tokens in one run.
    assert first.ttft_ns == 3 * 1000 + 20 * 10
    assert first.ended_ns - first.prompted_ns == 1000 + 4 * 100
    assert found.figures["served"] == 3
    assert found.figures["prefilled_tokens"] == 20 + 2 * 6


def test_with_one_slot_the_second_waits_and_the_first_loses_its_cache() -> None:
    scripts = scripts_of("a", "b", start=(0, 10))
    found, sink = run(scripts, slots=1, arrivals="closed")
    waited = next(t for t in found.turns if t.session_id == "b")
    assert waited.queued_ns > 0
    assert found.figures["displaced"] > 0
    assert any(e.op == Op.CLOSE and e.reason == "displaced" for e in sink.events)
    assert any(e.session_id == "a~2" for e in sink.events)
    alone, _ = run(scripts, arrivals="closed")
    assert found.figures["prefilled_tokens"] > alone.figures["prefilled_tokens"]


def test_every_simulated_session_folds_and_ends() -> None:
    scripts = scripts_of("a", "b", "c", policy="stream:sink=4,recent=20,block=8", start=(0, 5, 9))
    _, sink = run(scripts, slots=2, arrivals="closed")
    for name in dict.fromkeys(e.session_id for e in sink.events):
        assert fold([e for e in sink.events if e.session_id == name]).closed


def test_without_affinity_every_turn_begins_empty() -> None:
    found, sink = run(scripts_of("a"), affinity=False)
    assert found.figures["reused_tokens"] == 0
    assert len({e.session_id for e in sink.events}) == 3


def test_a_context_larger_than_the_memory_is_unserved_and_counted() -> None:
    found, _ = run(scripts_of("a"), memory_bytes=6399)
    assert found.figures["unserved"] == 3
    assert "6400 bytes" in (found.turns[0].why or "")
    assert run(scripts_of("a"), memory_bytes=6400)[0].figures["served"] == 3


def test_memory_bounds_how_many_contexts_are_open() -> None:
    found, _ = run(scripts_of("a", "b", start=(0, 10)), memory_bytes=6400, arrivals="closed")
    assert found.figures["displaced"] > 0
    assert found.figures["peak_kv_bytes"] <= 6400


def test_who_is_idle_longest_gives_up_its_slot_and_memory_first() -> None:
    @dataclasses.dataclass
    class Named:
        name: str
        n_bytes: int = 1

        def displaced(self) -> None:
            gone.append(self.name)

        def lost(self, slot: int) -> None: ...

    gone: list[str] = []
    env = simpy.Environment(initial_time=0)
    server = Server(env, 3, 6, 3)

    def hold(name: str) -> Generator[simpy.Event, Any, None]:
        tenant = tenants.setdefault(name, Named(name))
        yield from server.acquire(tenant)
        yield env.timeout(1)
        server.release(tenant, keep=True)

    def one_after_another() -> Generator[simpy.Event, Any, None]:
        for name in ("a", "b", "c", "a", "d", "e", "f"):
            yield env.process(hold(name))

    tenants: dict[str, Named] = {}
    env.process(one_after_another())
    env.run()
    assert gone == ["b", "c", "a"]


def test_what_does_not_fit_the_policy_is_refused_and_counted() -> None:
    found, _ = run(scripts_of("a"), n_ctx=24)
    assert found.figures["refused"] == 2
    assert found.figures["turns"] == 3
    assert "do not fit" in (found.turns[1].why or "")
    assert found.figures["prefill_regret_tokens"] is None


def test_a_decode_longer_than_the_context_is_cut_short() -> None:
    sink = recorded_toy(talk(1, decode=30), NONE)
    found, _ = run(read_scripts(MemoryLog([sink])), n_ctx=32)
    assert found.figures["cut_short"] == 1
    assert found.turns[0].generated == 12


def test_open_arrivals_keep_the_recorded_times_and_closed_the_thinking() -> None:
    scripts = scripts_of("a")
    slow = flat_costs(prefill=10**6, decode=10**6)
    late, _ = run(scripts, slow, arrivals="open")
    calm, _ = run(scripts, slow, arrivals="closed")
    assert [t.arrived_ns for t in late.turns] == [t.at_ns for t in scripts[0].turns]
    assert late.turns[1].queued_ns > 0
    assert all(t.queued_ns == 0 for t in calm.turns)
    gap = calm.turns[1].arrived_ns - calm.turns[0].ended_ns
    assert gap == scripts[0].turns[1].think_ns
    leisurely, _ = run(scripts, slow, arrivals="closed", pace=0.5)
    assert leisurely.turns[1].arrived_ns - leisurely.turns[0].ended_ns == 2 * gap > 0
    assert run(scripts, slow, arrivals="open", pace=2.0)[0].turns[1].arrived_ns == round(scripts[0].turns[1].at_ns / 2)


def test_the_link_carries_one_block_at_a_time() -> None:
    policy = "stream:sink=4,recent=20,block=8"
    scripts = scripts_of("a", "b", policy=policy, start=(0, 0))
    scripts = tuple(dataclasses.replace(s) for s in scripts)
    narrow = {"n_ctx": 32, "cold_tokens": 64, "arrivals": "closed", "link_latency_ns": 7}
    found, sink = run(scripts, link_bytes_per_s=10**6, **narrow)
    exported = sum(e.stop - e.start for s in sink.events if s.op == Op.EVICT and s.cold for e in s.blocks or ())
    assert found.figures["link_bytes"] == exported * 100 > 0
    free, _ = run(scripts, link_bytes_per_s=10**12, **narrow)
    assert found.figures["end_ns"] > free.figures["end_ns"]
    assert found.figures["evicted_tokens"] == free.figures["evicted_tokens"]


def test_a_transfer_takes_its_bytes_and_no_less() -> None:
    env = simpy.Environment(initial_time=0)
    link = Link(env, 3, 5)
    env.process(link.transfer(1))
    env.run()
    assert (env.now, link.busy_ns) == (333_333_339, 333_333_339)


def test_two_transfers_at_once_take_turns() -> None:
    env = simpy.Environment(initial_time=0)
    link = Link(env, 1000, 5)
    ends: list[int] = []

    def one() -> object:
        timeline = SimTimeline(env, link)

        def call() -> None:
            timeline.spend(10)
            timeline.carry(0, 2)

        yield from timeline.run(call)
        ends.append(timeline.now_ns())

    env.process(one())  # type: ignore[arg-type]
    env.process(one())  # type: ignore[arg-type]
    env.run()
    assert ends == [10 + 2_000_005, 10 + 2 * 2_000_005]
    assert (link.busy_ns, link.n_bytes) == (2 * 2_000_005, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": 0},
        {"link_bytes_per_s": 0},
        {"link_latency_ns": -1},
        {"memory_bytes": 0},
        {"pace": 0.0},
        {"pace": float("nan")},
        {"pace": float("inf")},
        {"arrivals": "sometimes"},
    ],
)
def test_a_machine_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SimulationError):
        Settings(**wrong)  # type: ignore[arg-type]


def test_specs_that_are_wrong_are_errors_and_not_outcomes() -> None:
    with pytest.raises(SpecError):
        run(scripts_of("a"), policy="lru:budget=3")
    with pytest.raises(SpecError):
        run(scripts_of("a"), policy="stream:sink=4,recent=100")


def test_work_without_a_price_ends_the_run() -> None:
    with pytest.raises(CostsError, match="decode"):
        run(scripts_of("a"), flat_costs(without=("decode",)))


def test_the_first_price_that_is_missing_is_the_one_that_is_named() -> None:
    costs = flat_costs(without=("evict", "truncate"))
    with pytest.raises(CostsError, match="say nothing of evict"):
        run(scripts_of("a"), costs, policy="stream:sink=4,recent=12,block=8", n_ctx=24)


def test_a_policy_that_the_engine_cannot_follow_is_refused() -> None:
    sink = recorded_toy(talk(), NONE)
    row = dataclasses.replace(sink.sessions[0], capabilities='{"remove_tail": true}')
    sink.sessions[0] = row
    with pytest.raises(UnsupportedOperation):
        run(read_scripts(MemoryLog([sink])), policy="stream:sink=4,recent=20,block=8,positions=rebased")


def test_a_log_without_a_prompt_or_with_time_that_goes_back_is_refused() -> None:
    empty = ListSink(sessions=[session_row("s", "r")], events=[event(0, Op.OPEN, run_id="r", session_id="s")])
    with pytest.raises(WorkloadError, match="no prompt"):
        read_scripts(MemoryLog([empty]))
    sink = recorded_toy(talk(), NONE)
    at = next(i for i, e in enumerate(sink.events) if e.op == Op.GENERATE)
    sink.events[at] = dataclasses.replace(sink.events[at], at_ns=0)
    with pytest.raises(WorkloadError, match="goes back"):
        read_scripts(MemoryLog([sink]))


def test_the_watchdog_ends_a_world_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_STEPS_WITHOUT_TIME", 50)

    def spin(self: running._Tenant) -> object:
        while True:
            yield self._world.env.timeout(0)

    monkeypatch.setattr(running._Tenant, "live", spin)
    with pytest.raises(Stalled, match="stands still"):
        run(scripts_of("a"))


def test_the_same_run_twice_is_the_same_to_the_last_event() -> None:
    scripts = scripts_of("a", "b", "c", policy="stream:sink=4,recent=20,block=8", start=(0, 3, 3))
    one, first = run(scripts, slots=2, link_bytes_per_s=10**6, cold_tokens=32)
    two, second = run(scripts, slots=2, link_bytes_per_s=10**6, cold_tokens=32)
    assert first.events == second.events
    assert one == two


def test_the_recorded_policy_repeats_what_the_recording_held() -> None:
    scripts = scripts_of("a", policy="stream:sink=4,recent=20,block=8", n_ctx=32)
    sink = recorded_toy(talk(), "stream:sink=4,recent=20,block=8", n_ctx=32, session_id="a", clock=ManualClock(1000))
    _, simulated = run(scripts)
    assert first_difference(sink.events, simulated.events) is None
    _, other = run(scripts, policy="stream:sink=4,recent=12,block=8")
    assert "against" in (first_difference(sink.events, other.events) or "")


def test_every_time_is_a_whole_number_whatever_the_pace() -> None:
    scripts = scripts_of("a", "b", policy="stream:sink=4,recent=20,block=8", start=(0, 3))
    for arrivals in ("open", "closed"):
        found, sink = run(
            scripts,
            n_ctx=32,
            cold_tokens=64,
            arrivals=arrivals,
            pace=0.7,
            slots=1,
            link_bytes_per_s=3,
            link_latency_ns=1,
        )
        times = [v for t in found.turns for name, v in dataclasses.asdict(t).items() if name.endswith("_ns")]
        times += [v for e in sink.events for v in (e.at_ns, e.elapsed_ns) if v is not None]
        times += [v for name, v in found.figures.items() if name.endswith("_ns") and v is not None]
        assert {type(v) for v in times} == {int}


def test_a_pace_is_exact_where_floats_are_not() -> None:
    ns = 2**60 + 1
    assert Settings(pace=3.0).paced(ns) == round(Fraction(ns, 3))
    assert Settings(pace=0.1).paced(ns // 100) == ns // 100 * 10
    assert Settings(pace=2.0).paced(ns) == 2**59  # half to the even
    with pytest.raises(SimulationError, match="292 years"):
        Settings(pace=1e-3).paced(ns)


def test_what_sessions_could_have_shared_and_did_not_is_said() -> None:
    def said(n_alike: int, n_other: int) -> list[str]:
        plays = [talk(1, first=40)] * n_alike + [lambda s: s.ensure_prefix(list(range(49, 9, -1)))] * n_other
        sinks = [recorded_toy(play, NONE, session_id=f"s{i}") for i, play in enumerate(plays)]  # type: ignore[arg-type]
        found, _ = run(read_scripts(MemoryLog(sinks)))
        return [text for text in found.assumed if "share nothing" in text]

    (text,) = said(3, 1)
    assert "of 4 the beginnings of 2 had been there before" in text
    assert said(1, 1) == []


def test_who_comes_at_the_same_time_is_served_in_the_order_of_the_log() -> None:
    scripts = scripts_of("c", "a", "b", start=(5, 5, 5))
    found, _ = run(scripts, slots=1, arrivals="closed")
    firsts = [t.session_id for t in sorted(found.turns, key=lambda t: t.began_ns) if t.turn == 1]
    assert firsts == [s.row.session_id for s in scripts]


def test_many_who_come_at_once_and_cost_nothing_are_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_STEPS_WITHOUT_TIME", 10)
    free = CostTable(flat_costs().origin, {k: KindCosts((0.0,) * len(c.rates)) for k, c in flat_costs().kinds.items()})
    found, _ = run(scripts_of(*(f"s{i}" for i in range(12)), start=(7,) * 12), free, arrivals="closed", slots=1)
    assert found.figures["served"] == 36
