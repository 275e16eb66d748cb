"""`kvtape whatif`, `tune` and `simulate` take somebody's trace as they take a log, and leave nothing beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.command import kvtape, kvtape_process
from support.imports import written

ROOF = "flops=1e12,bytes_per_s=1e11,params=1e9,weight_bytes=1e9,row_bytes=1000"
ROWS = "".join(
    json.dumps(
        {"timestamp": 500 * i, "input_length": 512 * (i + 1), "output_length": 8, "hash_ids": list(range(i + 1))}
    )
    + "\n"
    for i in range(4)
)
POINTS = ("--policy", "none", "--policy", "stream", "--budget", "1024")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    return written(tmp_path / "mine", ROWS, "trace.jsonl")


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("roof") / "costs.json"
    assert kvtape("calibrate", "--roofline", ROOF, "--out", path).code == 0
    return path


def report(verb: str, *args: object) -> Any:
    ran = kvtape(verb, *args, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def test_a_trace_gives_what_its_log_gives_and_nothing_is_left(trace: Path, costs: Path, tmp_path: Path) -> None:
    of_trace = report("whatif", trace, "--costs", costs, *POINTS)
    assert [p.name for p in trace.parent.iterdir()] == ["trace.jsonl"]
    assert [row["policy"].split(":")[0] for row in of_trace["rows"]] == ["none", "stream"]
    assert kvtape("import", trace, "--log", tmp_path / "log.duckdb").code == 0
    assert report("whatif", tmp_path / "log.duckdb", "--costs", costs, *POINTS) == of_trace


def test_it_comes_on_stdin_too_and_twice_it_is_the_same(trace: Path, costs: Path) -> None:
    piped = kvtape_process(["whatif", "-", "--costs", costs, *POINTS, "--json"], stdin=trace.read_bytes())
    assert piped.code == 0, piped.err
    assert json.loads(piped.out)["rows"] == report("whatif", trace, "--costs", costs, *POINTS)["rows"]


def test_simulate_and_tune_take_one(trace: Path, costs: Path) -> None:
    shown = report("simulate", trace, "--costs", costs, "--policy", "stream:sink=4,recent=764", "--n-ctx", "1024")
    assert shown["source_digest"] == report("whatif", trace, "--costs", costs, *POINTS)["source_digest"]
    best = report("tune", trace, "--costs", costs, "--budget", "1024", "--minimize", "ttft_p95", "--trials", "3")
    assert str(trace) in best["commands"]["simulate"]


@pytest.mark.parametrize(
    ("rows", "args", "words"),
    [
        ("{}\n", (), "--format"),
        (ROWS, ("--format", "azure"), "line 1"),
    ],
)
def test_a_trace_that_cannot_be_read_is_one_line(
    rows: str, args: tuple[str, ...], words: str, costs: Path, tmp_path: Path
) -> None:
    ran = kvtape("whatif", written(tmp_path, rows, "t.jsonl"), "--costs", costs, *POINTS, *args)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert words in ran.err


def test_options_of_a_trace_are_not_for_a_log(trace: Path, costs: Path, tmp_path: Path) -> None:
    assert kvtape("import", trace, "--log", tmp_path / "log.duckdb").code == 0
    ran = kvtape("whatif", tmp_path / "log.duckdb", "--costs", costs, *POINTS, "--format", "mooncake")
    assert ran.code == 2
    assert "--format" in ran.err
    missing = kvtape("whatif", tmp_path / "none.duckdb", "--costs", costs, *POINTS)
    assert missing.code == 2
    assert "none.duckdb" in missing.err
