"""`kvtape eval --task batching` on a tiny model: the JSON that scripts rely on, and every wrong option in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtape.traces.reader import open_log
from support.batching import batching_model
from support.command import Ran, kvtape

SMALL = ("--tokens", 300, "--seeds", "0:1", "--new-tokens", 24, "--budget-blocks", 4)


def evaluate(*more: object) -> Ran:
    return kvtape("eval", "--task", "batching", "--model", batching_model(), *more)


def test_json_and_tables_are_of_the_same_bytes_and_the_log_has_every_session(tmp_path: Path) -> None:
    log = tmp_path / "e.duckdb"
    asked = (*SMALL, "--policy", "stream", "--policy", "h2o:norm=mean")
    ran, shown = evaluate(*asked, "--json"), evaluate(*asked, "--log", log, "--content")
    assert (ran.code, shown.code) == (0, 0), ran.err
    body = json.loads(ran.out)
    assert f"report digest {body['digest']}" in shown.err
    assert {"schema", "digest", "kvtape_version", "config_digest", "agreement", "curve", "rules"} <= set(body)
    label = "continuous-batching:start=32,recent=32,most=128"
    assert [(r["kind"], r["policy"], r["rows_equal"], r["kept"]) for r in body["rows"]] == [
        ("native", label, True, "unknown"),
        ("dense", "none", False, "all"),
        ("policy", "stream:sink=32,recent=96,split=no", True, "in the log"),
        ("policy", "h2o:budget=160,sink=32,recent=32,norm=mean", True, "in the log"),
    ]
    assert body["agreement"][label]["same_model"] is True
    assert [(r["tokens"], r["last_tokens"], r["blocks"]) for r in body["curve"]] == [(300, 301, 10), (302, 323, 5)]
    lines = [line.split("\t") for line in shown.out.splitlines()]
    assert lines[2][:2] == [label, "4"]
    assert lines[2][-2:] == ["unknown", "unknown"]
    assert [line[0] for line in lines[3:5]] == ["dense", "stream:sink=32,recent=96,split=no"]
    assert "2 to 23" in lines[-1]
    with open_log(log) as read:
        assert read.sealed
        assert [t.task for t in read.trials()] == ["batching"] * 4
    assert kvtape("verify", log).code == 0


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--comparator", "vllm"], "unknown comparator 'vllm'"),
        (["--comparator", "continuous-batching:start=20"], "start=20 is not a multiple of its block of 32 tokens"),
        (["--budget-blocks", "2"], "most=64 leaves nothing to choose"),
        (["--budget-blocks", "20"], "of a prompt of 512 tokens, so there is nothing to compare"),
        (["--continue", "loudly"], "unknown --continue 'loudly'; allowed: greedy, text"),
        (["--backend", "llama", "--backend", "openvino"], "compares with one backend at a time"),
        (["--budget", "128"], "--budget: --task batching does not read it"),
        (["--n-ctx", "128"], "--n-ctx: --task batching does not read it"),
        (["--needle-at", "sink"], "--needle-at: --task batching does not read it"),
        (["--policy", "none"], "policy none never evicts"),
        (["--tokens", "4000"], "4065 tokens do not fit a context of 2048"),
        (["--prove-options", "--policy", "stream"], "--prove-options takes no --policy"),
        (["--prove-options", "--tokens", "200"], "evicts nothing of 200 tokens; raise --tokens over 352 or lower"),
    ],
)
def test_what_cannot_be_run_is_one_line(tmp_path: Path, options: list[str], line: str) -> None:
    log = [] if "--prove-options" in options else ["--log", tmp_path / "e.duckdb"]
    ran = evaluate(*options, *log, "--json")
    assert ran.code == 2, ran.err
    assert line in ran.err
    assert len(ran.err.splitlines()) == 1
    assert ran.out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_demo_model_is_refused_with_the_remedy() -> None:
    ran = kvtape("eval", "--task", "batching")
    assert ran.code == 2
    assert "does not read Q4_1 matrices rightly; give a file in F16, Q4_0, Q6_K, Q8_0, or the folder" in ran.err
