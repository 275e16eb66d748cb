"""`kvtape export`: files and stdout, exit codes, and round trips through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command import kvtape, kvtape_process

ROWS = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}\n' * 2


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    (folder / "trace.jsonl").write_text(ROWS)
    assert kvtape("import", folder / "trace.jsonl", "--log", folder / "log.duckdb").code == 0
    return folder / "log.duckdb"


def test_export_says_what_it_wrote(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    body = json.loads(kvtape("export", trace, "--format", "mooncake", "--out", out, "--json").out)
    assert (body["schema"], body["rows"], body["out"], body["format"]) == ("kvtape.export/1", 2, str(out), "mooncake")
    assert (body["digest_kind"], out.read_text()) == ("chain", ROWS)


def test_a_log_goes_through_a_pipe_and_comes_back(trace: Path, tmp_path: Path) -> None:
    lines = kvtape_process(["export", trace, "--format", "jsonl", "--out", "-"])
    assert (lines.code, lines.err) == (0, "")
    back = tmp_path / "back.duckdb"
    made = kvtape_process(["import", "-", "--format", "auto", "--log", back, "--json"], stdin=lines.out.encode())
    assert made.code == 0, made.err
    digests = [json.loads(kvtape("verify", log, "--json").out)["digest"] for log in (trace, back)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--format", "csv", "--out", "x"], "choose one of parquet, jsonl, mooncake"),
        (["--format", "parquet", "--out", "-"], "stdout holds one thing"),
        (["--format", "jsonl", "--out", "-", "--json"], "stdout holds one thing"),
        (["--format", "mooncake", "--out", "-", "--run", "none"], "no run 'none'; the log has"),
        (["--format", "perfetto", "--out", "x", "--run", "none"], "no run 'none'; the log has"),
        (["--format", "jsonl", "--out", "x", "--run", "none"], "jsonl holds every run"),
        (["--format", "parquet", "--out", "x", "--run", "none"], "leave run none away"),
        (["--format", "mooncake"], "--out"),
        (["--format", "jsonl", "--out", "none/x"], "none: no such folder; create it first"),
        (["--format", "parquet", "--out", "none/x"], "none: no such folder; create it first"),
    ],
)
def test_usage_is_exit_2(trace: Path, more: list[str], words: str) -> None:
    ran = kvtape("export", trace, *more)
    assert (ran.code, words in ran.err, ran.out) == (2, True, "")


def test_nothing_is_written_over(trace: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    ran = kvtape("export", trace, "--format", "mooncake", "--out", taken)
    assert (ran.code, taken.read_text()) == (2, "mine")
