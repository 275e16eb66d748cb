"""From a log to a workload and back: a session simulated under its own policy holds what it held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import KvtapeError
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.blocks import PromptSegment
from kvtape.planner.events import Op, Placement
from kvtape.planner.rows import TokensRow
from kvtape.planner.specs import parse_policy
from kvtape.sim.errors import SimulationError
from kvtape.sim.fidelity import first_difference
from kvtape.sim.world.reading import read_scripts
from kvtape.sim.world.running import simulate
from kvtape.sim.world.settings import Settings
from kvtape.sim.world.surrogates import Surrogates
from kvtape.testing.sink import ListSink
from kvtape.testing.toy import open_toy
from kvtape.traces.importers.importing import import_trace
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from support.logs import KEY, run_row
from support.simulated import MemoryLog, flat_costs, recorded_toy

POLICIES = (
    "none:block=8",
    "stream:sink=4,recent=20,block=8",
    "stream:sink=4,recent=20,block=8,positions=rebased",
    "stream:sink=4,recent=20,block=8,hole=refill",
    "class:budget=40,block=8",
    "random:budget=40,seed=3,block=8",
)
KINDS = ("system", "user", "repo_map", "tool", "assistant")

SEGMENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 20)), min_size=1, max_size=4)
CALLS = st.one_of(
    st.tuples(st.just("prefix"), st.integers(0, 60), SEGMENTS),
    st.tuples(st.just("suffix"), st.integers(1, 30), st.sampled_from(KINDS)),
    st.tuples(st.just("decode"), st.integers(1, 40), st.integers(0, 40)),
    st.tuples(st.just("evict"), st.integers(0, 50), st.integers(1, 12)),
    st.tuples(st.just("admit"), st.integers(0, 12), st.booleans()),
    st.tuples(st.just("compact")),
    st.tuples(st.just("plan"), st.integers(30, 60)),
)


def carry_out(session: Session, call: tuple[Any, ...], number: int) -> None:
    fresh = iter([(number * 17 + i * 7) % 50 for i in range(200)])
    name, *args = call
    if name == "prefix":
        kept = session.tape[: args[0]]
        parts = [PromptSegment(kind="user", tokens=tuple(kept))] if kept else []
        parts += [PromptSegment(kind=k, tokens=tuple(next(fresh) for _ in range(n))) for k, n in args[1]]
        session.ensure_prefix(parts)
    elif name == "suffix":
        session.prefill_suffix([next(fresh) for _ in range(args[0])], kind=args[1])
    elif name == "decode":
        said = [next(fresh) for _ in range(args[1])]
        session.decode(args[0], choose=lambda _: said.pop() if said else None, stop_tokens=frozenset())
    elif name == "evict":
        session.evict(args[0], args[0] + args[1])
    elif name == "admit":
        session.admit(args[0], Placement.IN_PLACE if args[1] else Placement.APPEND)
    elif name == "compact":
        session.compact()
    elif name == "plan":
        session.plan_now(args[0])


@settings(max_examples=40, deadline=None)
@given(policy=st.sampled_from(POLICIES), calls=st.lists(CALLS, min_size=1, max_size=10), defer=st.booleans())
def test_the_recorded_policy_gives_the_recorded_residency(
    policy: str, calls: list[tuple[Any, ...]], defer: bool
) -> None:
    def play(session: Session) -> None:
        session.ensure_prefix([i % 50 for i in range(40)])
        for number, call in enumerate(calls):
            before = len(session.tape)
            try:
                carry_out(session, call, number)
            except KvtapeError:
                if len(session.tape) != before:
                    return  # what was taken back half way leaves a tape that no call of a caller made

    recorded = recorded_toy(play, policy, defer=defer)
    sink = ListSink()
    found = simulate(read_scripts(MemoryLog([recorded])), Settings(), flat_costs(), sinks=[sink])
    if not found.figures["skipped"]:
        assert first_difference(recorded.events, sink.events) is None


def turns(session: Session) -> None:
    session.ensure_prefix([i % 50 for i in range(40)])
    session.decode(12, stop_tokens=frozenset())
    first = session.snapshot()
    session.prefill_suffix([1, 2, 3, 4, 5, 6, 7, 8, 9])
    session.decode(20, stop_tokens=frozenset())
    session.restore(first)
    session.ensure_prefix([*session.tape[:45], 30, 31, 32, 33])
    session.decode(7, stop_tokens=frozenset())
    session.ensure_prefix(session.tape)
    session.decode(3, stop_tokens=frozenset())


def test_snapshots_and_restores_are_part_of_the_workload() -> None:
    recorded = recorded_toy(turns)
    sink = ListSink()
    scripts = read_scripts(MemoryLog([recorded]))
    simulate(scripts, Settings(), flat_costs(), sinks=[sink])
    assert first_difference(recorded.events, sink.events) is None
    assert [e.snapshot_id for e in sink.events if e.op == Op.RESTORE] == [0]
    assert [len(t.steps) for t in scripts[0].turns] == [3, 3, 2, 2]


def test_calls_that_wait_are_read_with_what_they_offered() -> None:
    def play(session: Session) -> None:
        session.ensure_prefix([PromptSegment(kind="system", tokens=(1, 2, 3)), PromptSegment(kind="user", tokens=(4,))])
        session.prefill_suffix([5, 6], kind="tool")
        session.decode(2, stop_tokens=frozenset())
        session.ensure_prefix([1, 2, 9])  # replaced before anything is generated: nobody knows what it was
        session.ensure_prefix([1, 2, 7, 8])
        session.decode(1, stop_tokens=frozenset())

    recorded = recorded_toy(play, defer=True)
    (script,) = read_scripts(MemoryLog([recorded]))
    assert script.defer_prefill
    assert script.skipped == 1
    steps = [[(s.kind, [(x.kind, x.tokens) for x in s.stretches]) for s in t.steps] for t in script.turns]
    assert steps[0][:2] == [
        ("prefix", [("system", (1, 2, 3)), ("user", (4,))]),
        ("suffix", [("tool", (5, 6))]),
    ]
    assert [kind for kind, _ in steps[0]] == ["prefix", "suffix", "generate"]
    assert steps[1][0][1][-1][1][-2:] == (7, 8)


def test_the_first_token_of_a_prompt_that_waits_comes_after_its_prefill() -> None:
    def play(session: Session) -> None:
        session.ensure_prefix([i % 50 for i in range(20)])
        session.decode(5, stop_tokens=frozenset())

    times = []
    for defer in (False, True):
        world = simulate(read_scripts(MemoryLog([recorded_toy(play, defer=defer)])), Settings(), flat_costs(prefill=10))
        times.append([(t.prompted_ns, t.ended_ns) for t in world.turns])
    assert times[0] == times[1]


def test_another_policy_leaves_out_what_the_caller_asked_by_name_and_counts_it() -> None:
    def play(session: Session) -> None:
        session.ensure_prefix([i % 50 for i in range(40)])
        session.evict(8, 16)
        session.decode(4, stop_tokens=frozenset())

    scripts = read_scripts(MemoryLog([recorded_toy(play)]))
    sink = ListSink()
    found = simulate(scripts, Settings(policy="none:block=8"), flat_costs(), sinks=[sink])
    assert found.figures["not_repeated"] == 1
    assert not any(e.op == Op.EVICT for e in sink.events)


def test_a_policy_that_changed_on_the_way_changes_in_the_simulation_too() -> None:
    def play(session: Session) -> None:
        session.ensure_prefix([i % 50 for i in range(60)])
        session.decode(20, stop_tokens=frozenset())
        session.set_policy(parse_policy("class:budget=30,block=8"))
        session.decode(20, stop_tokens=frozenset())
        session.ensure_prefix([*session.tape, 1, 2, 3])

    recorded = recorded_toy(play)
    sink = ListSink()
    simulate(read_scripts(MemoryLog([recorded])), Settings(), flat_costs(), sinks=[sink])
    assert {p.policy for p in sink.plans} == {p.policy for p in recorded.plans}
    assert first_difference(recorded.events, sink.events) is None


def record(path: Path, *, content: bool) -> Path:
    recorder = Recorder(path, run_row("r"), clock=ManualClock(), key=KEY)
    backend = open_toy(SessionConfig(n_ctx=64, chunk=8, cold_budget_tokens=32))
    policy = parse_policy("stream:sink=4,recent=20,block=8")
    with Session(backend, policy, recorder, ManualClock(), run_id="r", session_id="s", content=content) as session:
        turns(session)
    recorder.seal()
    return path


@pytest.mark.parametrize("content", [True, False])
def test_a_log_without_content_runs_as_well(tmp_path: Path, content: bool) -> None:
    with open_log(record(tmp_path / "a.duckdb", content=content)) as log:
        sink = ListSink()
        simulate(read_scripts(log), Settings(), flat_costs(), sinks=[sink])
        assert first_difference(log.events("r", "s"), sink.events) is None


def _row(start: int, hashes: list[str], n: int) -> TokensRow:
    text = "[" + ",".join(f'"{h}"' for h in hashes) + "]"
    return TokensRow(
        run_id="r", session_id="s", seq=0, start=start, n_tokens=n, block_tokens=4, hashes=text, mac=None, tokens=None
    )


def test_surrogates_are_equal_where_the_hashes_are() -> None:
    ids = Surrogates()
    one = ids.of(_row(0, ["a", "b", "c"], 10), 0, 10)
    two = ids.of(_row(0, ["a", "b", "d"], 11), 0, 11)
    assert one[:8] == two[:8]
    assert not set(one[8:]) & set(two[8:])
    assert ids.of(_row(5, ["b"], 2), 5, 2) == one[5:7]
    assert not set(ids.of(None, 0, 5)) & set(one + two)
    assert len(set(one)) == 10


def test_an_imported_trace_runs_with_surrogates_that_share_what_its_hashes_share(tmp_path: Path) -> None:
    source = tmp_path / "trace.jsonl"
    asked = [(0, 700, [1, 2]), (50, 1100, [1, 2, 3]), (90, 600, [7, 8])]
    lines = [
        f'{{"timestamp": {t}, "input_length": {n}, "output_length": 5, "hash_ids": {ids}}}\n' for t, n, ids in asked
    ]
    source.write_text("".join(lines), encoding="utf-8")
    import_trace([source], tmp_path / "i.duckdb", format_name="mooncake", kvtape_version="0")
    with open_log(tmp_path / "i.duckdb") as log:
        scripts = read_scripts(log)
    prompts = [s.turns[0].steps[0].stretches[0].tokens for s in scripts]
    assert [len(p) for p in prompts] == [700, 1100, 600]
    assert prompts[0][:512] == prompts[1][:512]
    assert not set(prompts[2]) & set(prompts[0])
    assert [s.turns[0].at_ns for s in scripts] == [0, 50_000_000, 90_000_000]
    with pytest.raises(SimulationError, match="no context"):
        simulate(scripts, Settings(policy="none"), flat_costs())
    found = simulate(scripts, Settings(policy="none", n_ctx=2048), flat_costs())
    assert (found.figures["prefilled_tokens"], found.figures["generated_tokens"]) == (2400, 15)


def test_the_fields_of_a_script_are_what_was_recorded() -> None:
    (script,) = read_scripts(MemoryLog([recorded_toy(turns)]))
    first = script.turns[0]
    assert script.ended == "close"
    assert first.at_ns > 0
    assert first.steps[0].stretches[0].tokens == tuple(i % 50 for i in range(40))
    assert [s.kind for s in script.turns[1].steps] == ["suffix", "generate", "restore"]
    assert script.turns[1].tape[0].kind == "user"
