"""Old logs are read for ever; newer ones are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from kvtape.traces import query, upcast
from kvtape.traces.errors import LogTooNew
from kvtape.traces.reader import open_log
from kvtape.traces.schema import ROW_TABLES, SCHEMA_VERSION
from kvtape.traces.verify import verify
from support.forge import edit_log
from support.golden import GOLDEN, facts, unpack
from support.logs import script, write_log


def test_the_golden_log_of_version_1_reads_as_it_always_did(tmp_path: Path) -> None:
    path = unpack(tmp_path)
    result = verify(path)
    assert result.ok, result.findings
    with open_log(path) as log:
        assert log.schema_version == 1
        assert facts(log) == json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))
        assert log.events("r0", "s0") == script().events
        for run, session in (("r0", "s0"), ("r0", "scored")):
            assert log.state_at(run, session).next_seq == len(log.events(run, session))


def test_the_golden_log_has_rows_of_every_kind() -> None:
    rows = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))["rows"]
    assert {t.name for t in ROW_TABLES if rows.get(t.name)} == {t.name for t in ROW_TABLES}


def test_there_is_a_step_from_every_older_version() -> None:
    assert set(upcast.STEPS) == set(range(1, SCHEMA_VERSION))


def test_steps_follow_one_another() -> None:
    def rename(table: str, rows: pa.Table) -> pa.Table:
        return rows.rename_columns(["b" if c == "a" else c for c in rows.column_names])

    def add(table: str, rows: pa.Table) -> pa.Table:
        return rows.append_column("c", pa.nulls(rows.num_rows, pa.string())) if table == "events" else rows

    old = pa.table({"a": [1, 2]})
    steps = {1: rename, 2: add}
    assert upcast.upcast("events", old, 1, to=3, steps=steps).to_pydict() == {"b": [1, 2], "c": [None, None]}
    assert upcast.upcast("plans", old, 1, to=3, steps=steps).to_pydict() == {"b": [1, 2]}
    assert upcast.upcast("events", old, 2, to=3, steps=steps).column_names == ["a", "c"]
    assert upcast.upcast("events", old, 3, to=3, steps=steps) is old
    assert old.column_names == ["a"], "a step is pure"


def test_rows_of_an_older_log_are_brought_up_when_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that says version 0, with a column that was called otherwise then."""
    rename = "ALTER TABLE events RENAME COLUMN reason TO why"
    path = edit_log(
        write_log(tmp_path / "a.duckdb"),
        tmp_path / "old.duckdb",
        [rename, "UPDATE meta SET value = '0' WHERE key = 'schema_version'"],
        rechain=False,
    )

    def to_1(table: str, rows: pa.Table) -> pa.Table:
        return rows.rename_columns(["reason" if c == "why" else c for c in rows.column_names])

    monkeypatch.setattr(query, "upcast", lambda table, rows, version: to_1(table, rows) if version == 0 else rows)
    with open_log(path) as log:
        assert log.events("r0", "s0") == script().events


def test_a_newer_log_is_refused_with_both_versions_named(tmp_path: Path) -> None:
    newer = [
        "UPDATE meta SET value = '7' WHERE key = 'schema_version'",
        "UPDATE meta SET value = '9.1' WHERE key = 'kvtape_version'",
    ]
    path = edit_log(write_log(tmp_path / "a.duckdb"), tmp_path / "b.duckdb", newer, rechain=False)
    with pytest.raises(LogTooNew, match=rf"schema version 7 \(kvtape 9\.1\).*reads up to {SCHEMA_VERSION}: upgrade"):
        open_log(path)
