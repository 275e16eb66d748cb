"""Log folders and Parquet at the command line: every verb that reads takes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtape.traces.recorder import Recorder
from support.command import kvtape
from support.logs import TickClock, record_script, run_row, script
from support.recorded import POLICY, TEXT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "logs"
    made.mkdir()
    for name in ("a", "b"):
        recorder = Recorder(made, run_row(), clock=TickClock())
        record_script(recorder, script(name))
        recorder.seal()
    return made


def test_every_reading_verb_takes_a_folder_and_parquet(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = kvtape("merge", folder, "--out", "out", "--parquet", "--json")
    assert made.code == 0, made.err
    assert json.loads(made.out)["sessions"] == 2
    count = "SELECT session_id, count(*) AS n FROM events GROUP BY ALL ORDER BY ALL"
    for place in (folder, "parquet://out", f"parquet://{tmp_path}/o*t"):
        ran = kvtape("sql", place, count, "--json")
        assert ran.code == 0, ran.err
        n = len(script().events)
        assert json.loads(ran.out)["rows"] == [{"session_id": "a", "n": n}, {"session_id": "b", "n": n}]
        shown = kvtape("show", place, "--session", "b", "--json")
        assert shown.code == 0, shown.err
        assert kvtape("verify", place).code == 0
        same = kvtape("diff", place, folder)
        assert same.code == 0, same.out + same.err


def test_merge_makes_one_log(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "one.duckdb"
    assert kvtape("merge", folder, "--out", out).code == 0
    assert kvtape("verify", out).code == 0
    assert kvtape("diff", folder, out).code == 0
    assert kvtape("merge", folder, "--out", out).code == 2


def test_recording_into_a_folder_makes_a_segment_each_time(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (tmp_path / "t.txt").write_text(TEXT)
    options = ["--n-ctx", 256, "--chunk", 64, "--decode", 4, "--policy", POLICY]
    for _ in range(2):
        ran = kvtape("record", "--model", model, "--text", tmp_path / "t.txt", "--log", folder, *options)
        assert ran.code == 0, ran.err
    assert len(list(folder.glob("*.duckdb"))) == 2
    assert kvtape("verify", folder).code == 0
    ran = kvtape("sql", folder, "SELECT count(DISTINCT run_id) AS runs, count(*) AS sessions FROM sessions", "--json")
    assert json.loads(ran.out)["rows"] == [{"runs": 2, "sessions": 2}]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    ran = kvtape("record", "--model", model, "--text", tmp_path / "t.txt", "--log", tmp_path / "other", *options)
    assert ran.code == 2
    assert "neither empty nor a log folder" in ran.err
