"""`kvtape curve`: keys that scripts rely on, rules in the report, one sequence of bytes, and refusals in one line."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from support.command import kvtape, kvtape_process
from support.imports import imported, written

ROWS = "".join(
    f'{{"timestamp": {t}, "input_length": {512 * len(ids)}, "output_length": 1, "hash_ids": {ids}}}\n'
    for t, ids in enumerate([[1, 2], [1, 2, 3], [4], [1, 2], [4, 5], [1, 2, 3]])
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return written(tmp_path, ROWS, "trace.jsonl")


def report(*args: object) -> Any:
    ran = kvtape("curve", *args, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def test_the_report_has_its_keys_rules_and_digests(trace: Path) -> None:
    body = report(trace, "--policy", "lru", "--policy", "opt", "--budget-blocks", "4,2")
    assert body["schema"] == "kvtape.curve/1"
    assert {"kvtape_version", "digest", "config_digest", "source_digest"} <= body.keys()
    assert [(r["policy"], r["budget_blocks"]) for r in body["rows"]] == [("lru", 2), ("lru", 4), ("opt", 2), ("opt", 4)]
    assert all(0 <= r["hit_rate"] <= 1 for r in body["rows"])
    assert body["rules"] | {"name": "kvtape", "weighting": "token", "prefix": "longest", "warmup": 0.5} == body["rules"]
    assert body["rules"]["in_flight"] == "held"
    assert body["rules"]["admissions"] == "each request counts once, at its first admission"
    assert (body["requests"], body["measured_requests"], body["distinct_blocks"]) == (6, 3, 5)


def test_each_rule_can_be_chosen_and_shows(trace: Path) -> None:
    chosen = report(trace, "--weighting", "block", "--prefix", "any", "--warmup", "0", "--in-flight", "none")
    rules = chosen["rules"]
    assert rules["name"] == "kvtape varied"
    assert (rules["weighting"], rules["prefix"], rules["warmup"], rules["in_flight"]) == ("block", "any", 0.0, "none")
    assert chosen["config_digest"] != report(trace)["config_digest"]
    assert report(trace, "--warmup", "0.5")["rules"]["name"] == "kvtape"


def test_a_log_gives_what_its_trace_gives(trace: Path, tmp_path: Path) -> None:
    with imported(tmp_path, ROWS, "sample"):
        pass
    of_log, of_trace = report(tmp_path / "sample.duckdb"), report(trace)
    assert of_log["rows"] == of_trace["rows"]
    assert of_log["config_digest"] == of_trace["config_digest"]
    assert of_log["source_digest"] != of_trace["source_digest"]


def test_parquet_files_of_a_log_are_a_log_too(tmp_path: Path) -> None:
    with imported(tmp_path, ROWS, "sample"):
        pass
    log, out = tmp_path / "sample.duckdb", tmp_path / "parquet"
    assert kvtape("export", log, "--format", "parquet", "--out", out).code == 0
    assert report(f"parquet://{out}")["rows"] == report(log)["rows"]


def test_reports_and_pictures_are_one_sequence_of_bytes(trace: Path, tmp_path: Path) -> None:
    policies = [
        x for p in ("fifo", "lru", "lfu", "arc", "s3fifo", "sieve", "w-tinylfu", "opt") for x in ("--policy", p)
    ]
    runs = [
        kvtape_process(["curve", trace, "--json", *policies, "--plot", tmp_path / f"{seed}.svg"], PYTHONHASHSEED=seed)
        for seed in ("1", "2")
    ]
    assert runs[0].code == 0, runs[0].err
    assert runs[0].out == runs[1].out
    assert (tmp_path / "1.svg").read_bytes() == (tmp_path / "2.svg").read_bytes()
    root = ET.fromstring((tmp_path / "1.svg").read_text())
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 8


def test_a_trace_comes_on_stdin_too(trace: Path) -> None:
    ran = kvtape_process(["curve", "-", "--json"], stdin=trace.read_bytes())
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["rows"] == report(trace)["rows"]


def test_all_budgets_are_rows_where_the_rate_changes(trace: Path) -> None:
    steps = report(trace, "--policy", "lru", "--policy", "opt", "--budget-blocks", "all")["rows"]
    each = report(trace, "--policy", "lru", "--policy", "opt", "--budget-blocks", "1,2,3,4,5")["rows"]
    for row in each:
        known = [
            s["hits"] for s in steps if s["policy"] == row["policy"] and s["budget_blocks"] <= row["budget_blocks"]
        ]
        assert max(known, default=0) == row["hits"]
    assert kvtape("curve", trace, "--budget-blocks", "all").code == 2


def test_people_get_a_table_and_the_rules(trace: Path) -> None:
    ran = kvtape("curve", trace)
    assert ran.code == 0
    assert "blocks\ttokens\tfifo\tlru\topt" in ran.out
    assert "warmup\t0.5" in ran.out


def test_a_policy_of_ones_own_is_named_by_module_and_class(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from collections import OrderedDict\n\nclass Never:\n    def __init__(self, budget): pass\n"
    source += "    def access(self, block): return False\n    def __contains__(self, block): return False\n"
    source += "    def __len__(self): return 0\n"
    written(tmp_path, source, "my_curve_policy.py")
    monkeypatch.syspath_prepend(tmp_path)
    rows = report(trace, "--policy", "my_curve_policy:Never", "--budget-blocks", "3")["rows"]
    assert [(r["policy"], r["hits"]) for r in rows] == [("my_curve_policy:Never", 0)]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--policy", "lruu"], "did you mean 'lru'"),
        (["--rules", "mine"], "unknown rules 'mine'"),
        (["--weighting", "bytes"], "unknown weighting rule 'bytes'; allowed: block, token"),
        (["--in-flight", "maybe"], "unknown in-flight rule 'maybe'"),
        (["--warmup", "1"], "0 to below 1"),
        (["--warmup", "nan"], "--warmup nan: give a finite number"),
        (["--budget-blocks", "0"], "'0' is no number of blocks"),
        (["--budget-blocks", "1,,2"], "'' is no number of blocks"),
        (["--budget-blocks", "1e3"], "'1e3' is no number of blocks"),
        (["--rules", "kvcache-simulator", "--budget-blocks", "5000"], "not one budget is full when measuring begins"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(trace: Path, args: list[str], message: str) -> None:
    ran = kvtape("curve", trace, *args)
    assert ran.code == 2
    assert ran.out == ""
    assert message in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "empty"),
        ("[1]\n", "no format"),
        (ROWS.replace(": 3,", ": NaN,"), "line 4"),
        (ROWS.replace(": 3,", ": -3,"), "before 0"),
    ],
)
def test_bad_traces_are_one_line_and_exit_2(tmp_path: Path, data: str, message: str) -> None:
    ran = kvtape("curve", written(tmp_path, data, "bad.jsonl"))
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert ran.err.count("\n") == 1


def test_a_missing_file_and_a_format_for_a_log_are_refused(tmp_path: Path) -> None:
    assert kvtape("curve", tmp_path / "no.jsonl").code == 2
    with imported(tmp_path, ROWS, "sample"):
        pass
    ran = kvtape("curve", tmp_path / "sample.duckdb", "--format", "mooncake")
    assert ran.code == 2
    assert "a log; --format and --block-tokens are for traces" in ran.err
