"""A log written out as Parquet: one file for each day and session, whatever sessions are called."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from kvtape.traces import parquet_files
from kvtape.traces.exporters.exporting import export_log
from kvtape.traces.importers.importing import import_trace
from kvtape.traces.reader import open_log

NAMES = ["plain", "a/b", "..", "c=d", "50%", "grün", "two words", "x" * 60]
HEAD = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.mark.parametrize("rows_at_once", [3, 65_536])
def test_each_session_is_one_file_in_its_folder(
    tmp_path: Path, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_files, "_ROWS", rows_at_once)
    lines = [f"{i * 40_000}.0,{name},1.0,M,{i + 1},2,{i + 3},API log\n" for i, name in enumerate(NAMES * 3)]
    (tmp_path / "trace.csv").write_text(HEAD + "".join(lines))
    import_trace([tmp_path / "trace.csv"], tmp_path / "log.duckdb", kvtape_version="0")
    out = tmp_path / "out"
    with open_log(tmp_path / "log.duckdb") as log:
        export_log(log, "parquet", out)
        run = log.default_run().run_id
        digest, days = log.logical_digest(run), {path.parent.name for path in out.glob("events/*/*")}
    assert len(days) > 1
    files = list(out.glob("events/*/*/*"))
    assert len(files) == len(NAMES)
    found = duckdb.sql(
        f"SELECT session, session_id, count(*) FROM read_parquet('{out}/events/*/*/*.parquet', "
        "hive_partitioning = true, hive_types_autocast = false) GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    assert [row[0] for row in found] == [row[1] for row in found] == sorted(NAMES)
    assert {row[2] for row in found} == {8}  # open, three requests, close
    with open_log(f"parquet://{out}") as back:
        assert back.logical_digest(run) == digest


def test_a_name_too_long_for_a_folder_is_cut_and_told_apart_by_a_hash(tmp_path: Path) -> None:
    most = "m" * 240
    names = [most, most + "n", "g" + "ü" * 200 + "1", "g" + "ü" * 200 + "2", "+" * 300]
    rows = "".join(f"{i}.0,{name},1.0,M,{i + 1},2,{i + 3},API log\n" for i, name in enumerate(names))
    (tmp_path / "trace.csv").write_text(HEAD + rows)
    import_trace([tmp_path / "trace.csv"], tmp_path / "log.duckdb", kvtape_version="0")
    out = tmp_path / "out"
    with open_log(tmp_path / "log.duckdb") as log:
        export_log(log, "parquet", out)
        run = log.default_run().run_id
        digest = log.logical_digest(run)
    found = duckdb.sql(
        f"SELECT session, session_id, count(*) FROM read_parquet('{out}/events/*/*/*.parquet', "
        "hive_partitioning = true, hive_types_autocast = false) GROUP BY ALL"
    ).fetchall()
    assert sorted((row[1], row[2]) for row in found) == sorted((name, 4) for name in names)
    for session, name, _ in found:
        begin, _, ending = session.rpartition("+")
        assert session == name if name == most else (name.startswith(begin), len(ending)) == (True, 32)
    assert len({row[0] for row in found}) == len(names)
    with open_log(f"parquet://{out}") as back:
        assert back.logical_digest(run) == digest
