"""The state that a log gives is the one-by-one fold of its events, and its columns are those of the events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.planner.event_columns import EventColumns
from kvtape.planner.events import Event, Op
from kvtape.planner.residency import IllegalEvent, ResidencyMismatch, fold
from kvtape.traces.codec import to_arrow
from kvtape.traces.importers.importing import import_trace
from kvtape.traces.reader import Log, open_log
from kvtape.traces.schema import EVENTS, RUNS, SESSIONS
from kvtape.traces.session_columns import session_columns
from kvtape.traces.writer import LogWriter
from support.forge import edit_log
from support.golden import unpack
from support.logs import KEY, event, rows_of, run_row, script, session_row, write_log

MOONCAKE = (
    '{"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 10, "input_length": 1300, "output_length": 7, "hash_ids": [0, 1, 3]}\n'
)


def agree(log: Log, run: str, session: str) -> None:
    """At the end and after every event: states, what they raise, and the columns."""
    events = log.events(run, session)
    columns = log.columns(run, session, None)
    wanted = EventColumns.of(events)
    for field in fields(EventColumns):
        if field.name != "event":
            found = getattr(columns, field.name)
            assert found.dtype == getattr(wanted, field.name).dtype, field.name
            np.testing.assert_array_equal(found, getattr(wanted, field.name), field.name)
    assert [columns.event(i) for i in range(len(events))] == events
    assert result(lambda: log.state_at(run, session)) == result(lambda: fold(events))
    for n in range(1, len(events) + 1):
        seq = events[n - 1].seq
        assert result(lambda seq=seq: log.state_at(run, session, seq)) == result(lambda n=n: fold(events[:n]))  # type: ignore[misc]


def result(call: Callable[[], Any]) -> Any:
    try:
        state = call()
    except (IllegalEvent, ResidencyMismatch) as err:
        return str(err)
    return state, state.snapshots


@pytest.mark.parametrize("seal", [True, False], ids=["sealed", "recorded"])
def test_of_a_session_with_every_kind_of_change(tmp_path: Path, seal: bool) -> None:
    """Cold store, snapshots, truncations, refusals, and a session that goes on behind another."""
    path = write_log(tmp_path / "a.duckdb", [script(), script("s1")], seal=seal)
    with open_log(path) as log:
        assert log.sealed == seal
        for session in ("s0", "s1"):
            agree(log, "r0", session)


def test_of_the_golden_log_with_scores(tmp_path: Path) -> None:
    with open_log(unpack(tmp_path)) as log:
        for session in log.sessions("r0"):
            agree(log, "r0", session.session_id)


def test_of_an_import(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(MOONCAKE * 3, encoding="utf-8")
    import_trace([trace], tmp_path / "log.duckdb", kvtape_version="0")
    with open_log(tmp_path / "log.duckdb") as log:
        run = log.default_run().run_id
        sessions = log.sessions()
        assert sessions
        for session in sessions:
            agree(log, run, session.session_id)


@settings(max_examples=25, deadline=None)
@given(st.lists(rows_of(EVENTS), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_columns_of_any_rows_in_any_order(rows: list[Event], shuffled: Any) -> None:
    events = [replace(e, run_id="r0", session_id="s0", seq=3 * i) for i, e in enumerate(rows)]
    batches = [[e] for e in events]
    shuffled.shuffle(batches)
    with TemporaryDirectory() as folder:
        writer = LogWriter.create(Path(folder) / "a.duckdb", run_row(), KEY)
        writer.append({RUNS.name: to_arrow(RUNS, [run_row()]), SESSIONS.name: to_arrow(SESSIONS, [session_row()])})
        writer.append_group([{EVENTS.name: to_arrow(EVENTS, batch)} for batch in batches])
        writer.close()
        with open_log(writer.path) as log:
            agree(log, "r0", "s0")


def test_a_digest_that_does_not_fit_names_the_first_event_that_has_one(tmp_path: Path) -> None:
    good = write_log(tmp_path / "a.duckdb")
    last = script().events[-1].seq
    edits = [f"UPDATE events SET resident_digest = 1 WHERE seq IN (5, {last}) AND resident_digest IS NOT NULL"]
    bad = edit_log(good, tmp_path / "bad.duckdb", edits, rechain=True)
    with open_log(bad) as log:
        first = next(e.seq for e in log.events("r0", "s0") if e.resident_digest == 1)
        with pytest.raises(ResidencyMismatch, match=f"seq {first} "):
            log.state_at("r0", "s0")


def test_no_event_is_made_of_a_row_that_is_folded_as_a_column(tmp_path: Path) -> None:
    """Fetching them all would be right and slow."""
    writer = LogWriter.create(tmp_path / "a.duckdb", run_row(), KEY)
    n = 5000
    events = [event(0, Op.OPEN, n_tokens=2 * n), *(_decode(seq) for seq in range(1, n))]
    writer.append({EVENTS.name: to_arrow(EVENTS, events)})
    asked: list[int] = []

    def fetch(condition: str) -> list[Event]:
        query = f"SELECT seq FROM events WHERE {condition} ORDER BY seq"
        seqs = [s for (s,) in writer.connection.execute(query).fetchall()]
        asked.append(len(seqs))
        return [events[s] for s in seqs]

    from kvtape.planner.fold_columns import fold_columns

    columns = session_columns(writer.connection, "r0", "s0", None, fetch)
    assert fold_columns(columns) == fold(events)
    assert sum(asked) < 200
    assert columns.event(n - 1) == events[n - 1]
    writer.close()


def _decode(seq: int) -> Event:
    return event(seq, Op.DECODE, start=seq - 1, stop=seq, n_tokens=1, cache_start=seq - 1)
