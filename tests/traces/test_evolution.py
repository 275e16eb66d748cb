"""Old logs are read for ever, like those of today; newer ones are refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtape.replay.identities import check_identities
from kvtape.traces.errors import LogExists, LogTooNew
from kvtape.traces.exporters.exporting import export_log
from kvtape.traces.importers.importing import import_trace
from kvtape.traces.merge import merge, merge_to_parquet
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from kvtape.traces.redact import redact
from kvtape.traces.schema import ROW_TABLES, SCHEMA_VERSION
from kvtape.traces.union import Part, union
from kvtape.traces.verify import verify
from kvtape.traces.views import VIEWS
from support.forge import edit_log
from support.golden import GOLDEN, facts, unpack
from support.logs import KEY, TickClock, record_script, run_row, script, write_log


def facts_of(path: Path) -> dict[str, Any]:
    with open_log(path) as log:
        return facts(log)


@pytest.fixture(params=sorted(p.name for p in GOLDEN.iterdir()))
def golden(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def expected(golden: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / golden / "expected.json").read_text(encoding="utf-8"))
    return found


def test_a_golden_log_reads_as_it_always_did(golden: str, tmp_path: Path) -> None:
    path = unpack(tmp_path, golden)
    result = verify(path)
    assert result.ok, result.findings
    version = int(golden.removeprefix("log-v"))
    with open_log(path) as log:
        assert log.schema_version == version
        assert facts(log) == expected(golden)
        assert log.events("r0", "s0") == [replace(e, schema_version=version) for e in script().events]
        for run, session in (("r0", "s0"), ("r0", "scored")):
            assert log.state_at(run, session).next_seq == len(log.events(run, session))


def test_golden_logs_have_rows_of_every_kind(golden: str) -> None:
    version = int(golden.removeprefix("log-v"))
    assert {name for name, rows in expected(golden)["rows"].items() if rows} == {
        t.name for t in ROW_TABLES if t.since <= version
    }
    there = {c for rows in expected(golden)["rows"].values() for row in rows for c in json.loads(row)}
    assert {f.name for t in ROW_TABLES for f in t.fields if 1 < f.since <= version} <= there


def test_there_is_a_golden_log_of_every_version() -> None:
    assert {p.name for p in GOLDEN.iterdir()} == {f"log-v{n}" for n in range(1, SCHEMA_VERSION + 1)}


def test_later_columns_may_be_null() -> None:
    """Else an older log could not have them, nor keep its digests."""
    for table in ROW_TABLES:
        assert all(f.since <= SCHEMA_VERSION and (f.nullable or f.since == table.since) for f in table.fields)


def test_an_older_log_is_asked_like_one_of_today(tmp_path: Path) -> None:
    with open_log(unpack(tmp_path, "log-v1")) as log:
        assert log.certifications() == []
        query = "SELECT count(*), count(drafted_tokens) FROM events"
        assert log.sql(query)[1] == [(len(expected("log-v1")["rows"]["events"]), 0)]
        for table in ROW_TABLES:
            assert log.arrow(table.name).column_names == [*table.columns, "batch"]
        for view in VIEWS:
            assert tuple(log.sql(f"SELECT * FROM {view.name}")[0]) == tuple(name for name, _ in view.columns)
        assert all(not c.broken for c in check_identities(lambda q: log.sql(q)[1]))


def test_what_is_made_of_an_older_log_is_whole(tmp_path: Path) -> None:
    """Redacted it keeps its chain, merged its rows; as JSON lines it comes back."""
    old = unpack(tmp_path, "log-v1")
    before = facts_of(old)
    redact(old, tmp_path / "redacted.duckdb")
    assert verify(tmp_path / "redacted.duckdb").ok
    assert facts_of(tmp_path / "redacted.duckdb")["chain_digest"] == before["chain_digest"]
    merge([old], tmp_path / "merged.duckdb")
    merged = facts_of(tmp_path / "merged.duckdb")
    assert (merged["logical_digest"], merged["rows"]) == (
        before["logical_digest"],
        before["rows"] | {"certifications": []},
    )
    with open_log(old) as log:
        export_log(log, "jsonl", tmp_path / "lines.jsonl")
    import_trace([tmp_path / "lines.jsonl"], tmp_path / "back.duckdb", kvtape_version="0")
    assert facts_of(tmp_path / "back.duckdb") == before
    merge_to_parquet([old], tmp_path / "parquet")
    with open_log(f"parquet://{tmp_path / 'parquet'}") as log:
        assert log.logical_digest() == before["logical_digest"]


def test_logs_of_two_versions_are_read_as_one(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "today.duckdb", run_row("r1"), clock=TickClock(), key=KEY)
    record_script(recorder, script(run_id="r1"))
    recorder.seal()
    with open_log(unpack(tmp_path, "log-v1")) as old, open_log(tmp_path / "today.duckdb") as today:
        parts = [Part(log.path.name, log.meta, file=log.source) for log in (old, today)]
        with union(tmp_path, parts) as both:
            assert {r.run_id for r in both.runs()} == {"r0", "r1"}
            assert both.certifications("r0") == []
            assert both.events("r0", "s0") == old.events("r0", "s0")
            assert both.events("r1", "s0") == today.events("r1", "s0")


def test_nobody_goes_on_with_an_older_log(tmp_path: Path) -> None:
    path = edit_log(
        write_log(tmp_path / "a.duckdb", seal=False),
        tmp_path / "old.duckdb",
        ["UPDATE meta SET value = '1' WHERE key = 'schema_version'"],
        rechain=False,
    )
    with pytest.raises(LogExists, match="begun by an older kvtape; `kvtape repair` ends it"):
        Recorder(path, run_row(), clock=TickClock(), resume=True)


def test_a_newer_log_is_refused_with_both_versions_named(tmp_path: Path) -> None:
    newer = [
        "UPDATE meta SET value = '7' WHERE key = 'schema_version'",
        "UPDATE meta SET value = '9.1' WHERE key = 'kvtape_version'",
    ]
    path = edit_log(write_log(tmp_path / "a.duckdb"), tmp_path / "b.duckdb", newer, rechain=False)
    with pytest.raises(LogTooNew, match=rf"schema version 7 \(kvtape 9\.1\).*reads up to {SCHEMA_VERSION}: upgrade"):
        open_log(path)
