"""Group commit: batches that share a transaction are the links they would be alone."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.traces.canonical import in_canonical_order
from kvtape.traces.chain import link, summarise
from kvtape.traces.codec import to_arrow
from kvtape.traces.group import group_batches
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from kvtape.traces.schema import EVENTS, ROW_TABLES, RUNS, SESSIONS, TABLES
from kvtape.traces.sidecar import Head
from kvtape.traces.verify import verify
from kvtape.traces.writer import LogWriter
from support.logs import KEY, TickClock, event, rows_of, run_row, session_row

HEAD = Head("log", 7, "ab" * 32, 100, {"r0/s0": 3}, "cd" * 32)
Batch = dict[str, pa.Table]


@st.composite
def batches(draw: st.DrawFn) -> list[Batch]:
    tables = st.sampled_from(ROW_TABLES)
    return [
        {t.name: to_arrow(t, draw(st.lists(rows_of(t), max_size=4))) for t in draw(st.sets(tables, max_size=3))}
        for _ in range(draw(st.integers(1, 4)))
    ]


@settings(max_examples=60, deadline=None)
@given(batches())
def test_every_batch_is_the_link_that_it_would_be_alone(found: list[Batch]) -> None:
    """The rule of the chain itself, batch by batch, beside what a group makes of all of them at once."""
    group = group_batches(HEAD, found)
    previous, rows = bytes.fromhex(HEAD.digest), HEAD.rows
    for number, (batch, stored) in enumerate(zip(found, group.links, strict=True), HEAD.batch + 1):
        ordered = {name: in_canonical_order(TABLES[name], table) for name, table in batch.items()}
        summary = summarise(ordered)
        digest = link(previous, number, summary)
        assert stored == (number, summary.rows, summary.spans, summary.tables, previous, digest)
        for name, table in ordered.items():
            if table.num_rows:
                together = group.tables[name]
                mine = together.filter(pa.array([n == number for n in together.column("batch").to_pylist()]))
                assert mine.drop_columns(["batch"]).to_pylist() == table.to_pylist()
        previous, rows = digest, rows + summary.rows
    assert (group.head.batch, group.head.digest, group.head.rows) == (HEAD.batch + len(found), previous.hex(), rows)


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(0, 4))
def test_the_head_does_not_depend_on_how_batches_were_grouped(found: list[Batch], cut: int) -> None:
    parts = [part for part in (found[:cut], found[cut:]) if part]
    head = HEAD
    for part in parts:
        head = group_batches(head, part).head
    assert head == group_batches(HEAD, found).head


def test_a_log_of_groups_verifies_and_is_the_log_of_single_batches() -> None:
    split = [to_arrow(EVENTS, [event(seq) for seq in range(a, b)]) for a, b in pairwise((0, 5, 6, 20, 21))]
    first = {RUNS.name: to_arrow(RUNS, [run_row()]), SESSIONS.name: to_arrow(SESSIONS, [session_row()])}
    heads = []
    for sizes in ((1, 1, 1, 1), (3, 1), (4,)):
        with TemporaryDirectory() as folder:
            writer = LogWriter.create(Path(folder) / "a.duckdb", run_row(), KEY)
            writer.append(first)
            waiting = [{EVENTS.name: table} for table in split]
            for size in sizes:
                head = writer.append_group(waiting[:size])
                del waiting[:size]
            assert writer.append_group([]) == head
            writer.close()
            assert verify(writer.path).ok
            heads.append((head.batch, head.digest, head.rows, head.sessions))
    assert heads[0] == heads[1] == heads[2] == (5, heads[0][1], 23, {"r0/s0": 20})


def test_what_waits_shares_a_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, groups = threading.Event(), []
    append = LogWriter.append_group

    def counted(writer: LogWriter, found: list[Batch]) -> Head:
        groups.append([sum(t.num_rows for name, t in b.items() if name == "events") for b in found])
        assert go.wait(30)
        return append(writer, found)

    with Recorder(tmp_path / "a.duckdb", run_row(), clock=TickClock(), key=KEY, batch_events=4) as rec:
        monkeypatch.setattr(LogWriter, "append_group", counted)
        rec.open_session(session_row())
        for seq in range(4 * 20):
            rec.record(event(seq))
        go.set()
        assert rec.flush() == 80
    assert sum(map(sum, groups)) == 80
    assert max(map(len, groups)) == 16
    assert all(n <= 4 for group in groups for n in group)
    with open_log(rec.path) as log:
        sizes = log.sql("SELECT count(*) FROM events GROUP BY batch")[1]
    assert sum(n for (n,) in sizes) == 80
    assert max(n for (n,) in sizes) == 4
    assert verify(rec.path).ok
