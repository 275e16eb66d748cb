"""Views against the fold and against the sessions that a real Session records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.backends.session import Session
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.events import Event, Op
from kvtape.planner.residency import ResidencyState, apply
from kvtape.planner.specs import parse_policy
from kvtape.testing.toy import TOY_CAPABILITIES, ToyBackend
from kvtape.traces.codec import to_arrow
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from kvtape.traces.schema import ALL_TABLES, EVENTS, SESSIONS, create_table, create_types
from kvtape.traces.views import VIEWS
from support.logs import KEY, TickClock, run_row, session_row
from support.sessions import random_scripts
from support.toys import toy_backend


@pytest.fixture(scope="module")
def database() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    statements = [*create_types(), *(create_table(t) for t in ALL_TABLES)]
    statements += [f"CREATE VIEW {v.name} AS {v.sql}" for v in VIEWS]
    for statement in statements:
        connection.execute(statement)
    return connection


def load(database: duckdb.DuckDBPyConnection, events: list[Event]) -> None:
    for table, rows in ((SESSIONS, [session_row()]), (EVENTS, events)):
        database.execute(f"DELETE FROM {table.name}")
        database.register("incoming", to_arrow(table, rows))
        database.execute(f"INSERT INTO {table.name} SELECT *, 1 FROM incoming")


@settings(max_examples=60, deadline=None)
@given(made=random_scripts(97, max_steps=30))
def test_residency_is_what_the_fold_says(database: duckdb.DuckDBPyConnection, made: Any) -> None:
    load(database, made.events)
    rows = database.execute("SELECT seq, resident_tokens, cold_tokens FROM residency ORDER BY seq").fetchall()
    state = ResidencyState()
    for e, row in zip(made.events, rows, strict=True):
        state = apply(state, e)
        assert row == (e.seq, state.resident_tokens, state.cold_ranges.n_tokens)


@settings(max_examples=40, deadline=None)
@given(made=random_scripts(97, max_steps=30), data=st.data())
def test_residency_carries_values_over_events_that_record_none(
    database: duckdb.DuckDBPyConnection, made: Any, data: st.DataObject
) -> None:
    load(
        database,
        [e if e.op != Op.SNAPSHOT else replace(e, resident_tokens=None, resident_digest=None) for e in made.events],
    )
    rows = database.execute("SELECT resident_tokens, resident_digest FROM residency ORDER BY seq").fetchall()
    assert rows == [(e.resident_tokens, e.resident_digest) for e in made.events]


def recorded(path: Path, backend: ToyBackend, policy: str, steps: Any) -> Any:
    """The log of one session over a backend of books; `steps(session)` drives it."""
    recorder = Recorder(path, run_row(), clock=TickClock(), key=KEY)
    session = Session(
        backend, policy=parse_policy(policy), sink=recorder, clock=TickClock(), run_id="r0", session_id="s0",
        content=True,
    )  # fmt: skip
    steps(session)
    session.close()
    recorder.seal()
    return open_log(path)


def reasons(log: Any, first_turn: int = 1) -> list[tuple[str, str, int, int | None]]:
    return log.sql(
        "SELECT op::VARCHAR, reason, tokens, replaced_tokens FROM why_prefilled "
        f"WHERE turn >= {first_turn} ORDER BY seq"
    )[1]


def test_every_prefill_has_its_reason(tmp_path: Path) -> None:
    def steps(s: Session) -> None:
        a = list(range(1, 21))
        s.ensure_prefix(a[:10])
        s.ensure_prefix(a[:10])
        s.ensure_prefix(a[:14])
        s.ensure_prefix([*a[:5], 40, 41, 42])
        s.prefill_suffix([50, 51])
        s.decode(3, stop_tokens=frozenset())
        s.ensure_prefix([*a[:5], 40, 41, 42, 50, 51])
        s.ensure_prefix([60, 61])

    with recorded(tmp_path / "a.duckdb", toy_backend(), "none", steps) as log:
        assert reasons(log) == [
            ("prefill", "cold", 10, 0),
            ("prefill", "last_token_for_logits", 1, 1),
            ("prefill", "extended", 4, 0),
            ("prefill", "diverged", 3, 3),
            ("prefill", "suffix", 2, 0),
            ("prefill", "last_token_for_logits", 1, 1),
            ("prefill", "diverged", 2, 2),
        ]
        turns = log.sql(
            "SELECT turn, prefix_tokens, prompt_tokens, reused, prefilled, dropped, suffix, completion_tokens "
            "FROM turns ORDER BY turn"
        )[1]
        assert turns[3] == (4, 8, 10, 5, 3, 9, 2, 3)
        assert all(prefix == reused + prefilled for _, prefix, _, reused, prefilled, *_ in turns)
        shares = log.sql("SELECT reused_share, session_reused_share FROM reuse ORDER BY turn")[1]
        assert shares[1] == (0.9, 0.45)
        assert shares[-1][0] == 0


def test_a_hole_that_had_to_be_computed_again_is_evicted(tmp_path: Path) -> None:
    def steps(s: Session) -> None:
        s.ensure_prefix(list(range(20)))
        s.evict(4, 8)
        s.ensure_prefix([*range(20), 30])

    with recorded(tmp_path / "refill.duckdb", toy_backend(), "none", steps) as log:
        assert reasons(log, 2) == [("recompute", "evicted", 4, None), ("prefill", "extended", 1, 0)]
    cannot = toy_backend(capabilities=replace(TOY_CAPABILITIES, recompute_range=False))
    with recorded(tmp_path / "hole.duckdb", cannot, "none", steps) as log:
        assert reasons(log, 2) == [("prefill", "evicted", 16, 16), ("prefill", "extended", 1, 0)]


@pytest.mark.parametrize(
    ("capabilities", "positions", "reason"),
    [
        (Capabilities(remove_tail=True, recompute_range=True), "auto", "surgery_impossible"),
        (replace(TOY_CAPABILITIES, position_shift=False), "rebased", "shift_impossible"),
    ],
)
def test_a_rebuilt_cache_says_why(tmp_path: Path, capabilities: Capabilities, positions: str, reason: str) -> None:
    backend = toy_backend(n_ctx=32, capabilities=capabilities, cold_budget_tokens=0)
    recorder = Recorder(tmp_path / "a.duckdb", run_row(), clock=TickClock(), key=KEY)
    session = Session(
        backend, policy=parse_policy(f"stream:sink=4,recent=8,positions={positions}"), sink=recorder,
        clock=TickClock(), run_id="r0", session_id="s0", allow_recompute=True, evict_by="recompute",
    )  # fmt: skip
    session.ensure_prefix(list(range(48)))
    session.close()
    recorder.close()
    with open_log(tmp_path / "a.duckdb") as log:
        assert ("evict", reason) in {r[:2] for r in reasons(log)}


def test_plans_are_joined_with_the_evicts_they_caused(tmp_path: Path) -> None:
    def steps(s: Session) -> None:
        s.ensure_prefix(list(range(60)))
        s.decode(40, stop_tokens=frozenset())

    backend = toy_backend(n_ctx=32, cold_budget_tokens=64)
    with recorded(tmp_path / "a.duckdb", backend, "stream:sink=4,recent=8", steps) as log:
        rows = log.sql(
            "SELECT seq, planned_evict_tokens, evicted_tokens, evicts, cold_evicts, over_budget FROM decisions"
        )[1]
        events = log.events("r0", "s0")
        assert [r[0] for r in sorted(rows)] == [e.seq for e in events if e.op == Op.PLAN]
        assert all(planned == evicted for _, planned, evicted, *_ in rows)
        assert sum(r[3] for r in rows) == sum(e.op == Op.EVICT for e in events) > 3
        assert all(evicts == cold for _, _, _, evicts, cold, _ in rows)
        cold = log.sql("SELECT cold_tokens FROM residency ORDER BY seq DESC LIMIT 1")[1][0][0]
        assert cold == log.state_at("r0", "s0").cold_ranges.n_tokens > 0
        costs = {(r[0], r[1]): r[2:] for r in log.sql("SELECT op::VARCHAR, way, events, tokens FROM costs")[1]}
        assert costs["decode", None] == (
            sum(e.op == Op.DECODE for e in events),
            sum(e.n_tokens for e in events if e.op == Op.DECODE),
        )
        assert costs["evict", "gap"][1] == sum(r[2] for r in rows)


def test_a_fatal_names_its_cause_and_what_came_before(tmp_path: Path) -> None:
    def steps(s: Session) -> None:
        s.ensure_prefix([1, 2, 3])
        backend.faults.add("decode")
        with pytest.raises(Exception, match="poisoned"):
            s.decode(1)

    backend = toy_backend()
    with recorded(tmp_path / "a.duckdb", backend, "none", steps) as log:
        rows = log.sql("SELECT error_class, previous_op::VARCHAR, resident_tokens, reason FROM fatals")[1]
    assert [r[:3] for r in rows] == [("decode_failed", "generate", 3)]
    assert "planted in decode" in rows[0][3]


def test_a_restore_that_left_nothing_of_the_prefix_is_told(database: duckdb.DuckDBPyConnection) -> None:
    base = {"session_id": "s0", "run_id": "r0", "at_ns": 0, "generation": 0}
    events = [
        Event(seq=0, op=Op.PREFILL, turn=1, start=0, stop=8, n_tokens=8, **base),
        Event(seq=1, op=Op.RESTORE, turn=1, snapshot_id=0, **base),
        Event(seq=2, op=Op.PROMPT, turn=2, start=6, n_tokens=9, **base),
        Event(seq=3, op=Op.PREFILL, turn=2, start=6, stop=9, n_tokens=3, reused=0, **base),
    ]
    load(database, events)
    found = database.execute("SELECT seq, reason FROM why_prefilled ORDER BY seq").fetchall()
    assert found == [(0, "unknown"), (3, "restore_had_no_effect")]


@pytest.mark.parametrize("view", VIEWS, ids=lambda v: v.name)
def test_every_view_has_the_columns_it_names_and_its_example_runs(view: Any, tmp_path: Path) -> None:
    with recorded(tmp_path / "a.duckdb", toy_backend(), "none", lambda s: s.ensure_prefix([1, 2, 3])) as log:
        assert log.sql(f"SELECT * FROM {view.name}")[0] == [name for name, _ in view.columns]
        log.sql(view.example)
