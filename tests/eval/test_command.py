"""`kvtape eval` on a tiny model: the JSON that scripts rely on, and every wrong option in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtape.traces.reader import open_log
from support.command import Ran, kvtape
from support.tiny_gguf import write_tiny

NEEDLE = ("--tokens", 400, "--seeds", "0:2", "--policy", "stream", "--budget", 96)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")


def evaluate(model: Path, *more: object) -> Ran:
    return kvtape("eval", "--model", model, *more)


def printed(ran: Ran) -> dict[str, Any]:
    assert ran.code == 0, ran.err
    body: dict[str, Any] = json.loads(ran.out)
    return body


def test_two_runs_print_the_same_bytes_with_and_without_a_log(model: Path, tmp_path: Path) -> None:
    asked = (*NEEDLE, "--policy", "snapkv:sink=4,queries=probe", "--policy", "random", "--json")
    both = ("--backend", "llama:scores=on", "--backend", "openvino")
    first = evaluate(model, *asked, *both)
    second = evaluate(model, *asked, *both, "--log", tmp_path / "e.duckdb", "--content", "--timings")
    assert first.out == second.out
    body = printed(first)
    assert body["schema"] == "kvtape.eval/1"
    assert {"digest", "kvtape_version", "config_digest", "config", "engines", "rules", "seeds"} <= set(body)
    assert body["rules"]["interval"] == "Wilson score, 95 %"
    rows = body["rows"]
    assert [(r["backend"], r["policy"], r["budget"], r["scored"]) for r in rows] == [
        ("llama:scores=on", "none", None, None),
        ("llama:scores=on", "stream:sink=4,recent=92", 96, None),
        ("llama:scores=on", "snapkv:budget=96,sink=4,queries=probe", 96, True),
        ("llama:scores=on", "random:budget=96,seed=trial", 96, None),
        ("openvino", "none", None, None),
        ("openvino", "stream:sink=4,recent=92", 96, None),
        ("openvino", "snapkv:budget=96,sink=4,queries=probe", 96, False),
        ("openvino", "random:budget=96,seed=trial", 96, None),
    ]
    for row in rows:
        assert row["n"] == 2
        assert 0 <= row["recall_low"] <= row["recall"] <= row["recall_high"] <= 1
        assert row["kept"] <= (row["budget"] or 400)
    assert kvtape("verify", tmp_path / "e.duckdb").code == 0
    with open_log(tmp_path / "e.duckdb") as log:
        assert log.sealed
        assert log.default_run().config_digest == body["config_digest"]
        assert len(log.trials()) == 16
    assert "s a trial" in second.err


def test_a_log_of_trials_replays_like_any_other(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "e.duckdb"
    asked = ("--tokens", 300, "--seeds", "0:1", "--policy", "stream", "--policy", "h2o:recent=8", "--budget", 64)
    assert evaluate(model, *asked, "--log", log, "--content").code == 0
    ran = kvtape("replay", log, "--model", model, "--on", "llama", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["equal"] is True


def test_dense_alone_is_a_run(model: Path) -> None:
    rows = printed(evaluate(model, "--tokens", 200, "--seeds", "0:1", "--json"))["rows"]
    assert [r["policy"] for r in rows] == ["none"]


def test_a_pipe_gets_tab_separated_lines(model: Path) -> None:
    ran = evaluate(model, *NEEDLE)
    lines = ran.out.splitlines()
    assert lines[1].split("\t")[:5] == ["backend", "region", "policy", "budget", "recall"]
    assert len(lines) == 4


def test_likelihood_rows_and_their_bytes(model: Path, tmp_path: Path) -> None:
    asked = ("--task", "nll", "--tokens", 1100, "--policy", "stream:sink=0", "--policy", "stream", "--budget", 224)
    first, second = (evaluate(model, *asked, "--backend", "llama", "--json") for _ in range(2))
    assert first.out == second.out
    rows = printed(first)["rows"]
    assert [(r["policy"], r["part"]) for r in rows] == [
        (policy, part)
        for policy in ("none", "stream:sink=0,recent=224", "stream:sink=4,recent=220")
        for part in ("all", "0-1000", "1000-1100")
    ]
    assert all(r["resident_most"] <= r["n_ctx"] for r in rows)
    text = tmp_path / "t.txt"
    text.write_text("A cache is a promise about the future. " * 9, encoding="utf-8")
    given = printed(evaluate(model, "--task", "nll", "--text", text, "--backend", "llama", "--json"))
    assert given["config"]["text"] != ""
    assert given["config"]["seed"] is None


def test_a_text_is_one_trial_so_random_says_which_seed_it_drew_with(model: Path) -> None:
    asked = ("--task", "nll", "--tokens", 80, "--n-ctx", 64, "--policy", "random:budget=40", "--backend", "llama")
    assert (
        printed(evaluate(model, *asked, "--seeds", "7:9", "--json"))["rows"][-1]["policy"] == "random:budget=40,seed=7"
    )


def test_layers_are_chosen_and_used(model: Path) -> None:
    shown = printed(evaluate(model, *NEEDLE, "--choose-layers", "--json"))
    assert shown["n_layers"] == 2
    assert shown["rows"][0]["layers"] == shown["layers"]
    assert [r["margin"] for r in shown["rows"]] == sorted((r["margin"] for r in shown["rows"]), reverse=True)
    asked = ("--tokens", 400, "--seeds", "5:6", "--layer-seeds", "0:2", "--policy", "stream", "--budget", 96)
    used = printed(evaluate(model, *asked, "--policy", "tova:layers=chosen", "--json"))
    assert used["layers"] == shown["layers"]
    assert used["rows"][2]["policy"] == f"tova:budget=96,layers={shown['layers']}"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--task", "noodle"], "unknown task 'noodle', did you mean 'needle'? allowed: batching, needle, nll"),
        (["--format", "town"], "unknown format 'town'; allowed: city, passkey"),
        (["--needle-at", "front"], "unknown region 'front'; allowed: middle, recent, sink"),
        (["--seeds", "4:4"], "--seeds 4:4: the range is empty"),
        (["--seeds", "0:999999999"], "999,999,999 numbers; at most 100,000 are taken"),
        (["--tokens", "99999999"], "a context of 99999999 tokens is asked, the model was trained on 4096"),
        (["--text", "book.txt"], "--text: --task needle does not read it"),
        (["--task", "nll", "--format", "city"], "--format: --task nll does not read it"),
        (["--task", "nll", "--needle-at", "sink"], "--needle-at: --task nll does not read it"),
        (["--task", "nll", "--choose-layers"], "--choose-layers: --task nll does not read it"),
        (["--task", "nll", "--layer-seeds", "0:3"], "--layer-seeds: --task nll does not read it"),
        (["--comparator", "continuous-batching"], "--comparator: --task needle does not read it"),
        (["--task", "nll", "--budget-blocks", "4"], "--budget-blocks: --task nll does not read it"),
        (["--task", "nll", "--prove-options"], "--prove-options: --task nll does not read it"),
        (["--seeds", "four"], "--seeds 'four': write A:B"),
        (["--policy", "stream"], "policy stream: names no budget; give one in the spec or with --budget"),
        (["--policy", "class:budget=1000"], "a budget of 1000 evicts nothing of a context of at most 1000 tokens"),
        (["--tokens", "5000"], "the model was trained on 4096; lower --tokens"),
        (["--n-ctx", "512"], "--n-ctx is 512; lower --tokens"),
        (["--needle-at", "sink", "--policy", "stream:sink=4,recent=9"], "region sink: no place for the fact"),
        (
            ["--backend", "lama"],
            "unknown backend 'lama', did you mean 'llama'? choose one of llama",
        ),
        (["--backend", "llama", "--backend", "llama"], "--backend: one of them is given twice"),
        (["--policy", "tova:budget=99,layers=chosen"], "layers=chosen: say on which seeds with --layer-seeds A:B"),
        (["--layer-seeds", "0:9"], "--layer-seeds: no policy says layers=chosen"),
        (
            ["--policy", "tova:budget=99,layers=chosen", "--layer-seeds", "19:30"],
            "--layer-seeds 19:30 and --seeds 0:20 overlap",
        ),
        (["--choose-layers", "--layer-seeds", "30:40"], "--choose-layers chooses on --seeds"),
        (
            ["--choose-layers", "--backend", "llama"],
            "score is not possible here: the session was opened without a score",
        ),
        (
            ["--policy", "stream:sink=4,recent=9", "--backend", "openvino:mirror=off"],
            "evicting on openvino:mirror=off is not possible here",
        ),
        (["--policy", "stream:sink=4,recent=9", "--backend", "llama:speed=9"], "unknown option"),
        (["--task", "nll", "--policy", "class:budget=256"], "a budget of 256 leaves no room for a new token"),
        (["--task", "nll", "--policy", "stream:sink=4,recent=252"], "256"),
        (["--task", "nll", "--text", "nowhere.txt"], "nowhere.txt: no such file"),
    ],
)
def test_what_cannot_be_run_is_one_line(model: Path, tmp_path: Path, options: list[str], line: str) -> None:
    log = tmp_path / "e.duckdb"
    ran = evaluate(model, *options, "--log", log, "--json")
    assert ran.code == 2
    assert line in ran.err
    assert len(ran.err.splitlines()) == 1
    assert ran.out == ""
    assert not log.exists()


def test_a_function_that_fails_is_one_line_and_what_ran_before_is_a_whole_log(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "e.duckdb"
    ran = evaluate(model, *NEEDLE, "--policy", "os:getcwd", "--log", log)
    assert ran.code == 2
    assert "policy os:getcwd: TypeError" in ran.err
    assert len(ran.err.splitlines()) == 1
    assert kvtape("verify", log).code == 0
    with open_log(log) as opened:
        assert [t.policy for t in opened.trials()] == ["none", "stream:sink=4,recent=92"]


def test_content_without_a_log_is_refused(model: Path) -> None:
    ran = evaluate(model, *NEEDLE, "--content")
    assert ran.code == 2
    assert "--content: nothing is stored without --log" in ran.err


def test_a_log_that_is_there_is_never_overwritten(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "e.duckdb"
    log.write_bytes(b"mine")
    ran = evaluate(model, *NEEDLE, "--log", log)
    assert ran.code == 2
    assert "exists already" in ran.err
    assert log.read_bytes() == b"mine"
