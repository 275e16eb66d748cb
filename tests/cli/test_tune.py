"""`kvtape whatif --seeds` and `kvtape tune` from the command line, on a log of a real engine."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from support.command import kvtape, kvtape_process

ROOFLINE = "flops=1e9,bytes_per_s=1e9,params=1e5,weight_bytes=2e5,row_bytes=512"


@pytest.fixture(scope="module")
def asked(log: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The log and costs that are made up: what is tested here does not depend on the machine."""
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    ran = kvtape("calibrate", "--roofline", ROOFLINE, "--out", path)
    assert ran.code == 0, ran.err
    return [log, "--costs", path]


TUNE = ["--budget", "128:512", "--trials", 12, "--where", "peak_kv_bytes<=100KiB", "--minimize", "forgotten"]
WHATIF = ["--policy", "stream", "--policy", "class", "--budget", 256, "--seeds", 3, "--seed", 2]


def test_the_best_point_is_printed_with_the_command_that_repeats_it(asked: list[object]) -> None:
    ran = kvtape("tune", *asked, *TUNE, "--json")
    assert ran.code == 0, ran.err
    said = json.loads(ran.out)
    assert said["feasible"] is True
    assert said["best"]["peak_kv_bytes"] <= 100 * 1024
    assert said["best"]["not_served"] == 0
    assert said["best"]["forgotten_tokens"] == min(r["forgotten_tokens"] for r in said["rows"] if r["feasible"])
    assert sum(row["error"] is None for row in said["rows"]) == 12
    assert set(said["trials"]) == set(range(len(said["rows"])))
    words = shlex.split(said["commands"]["simulate"])
    again = json.loads(kvtape(*words[1:], "--json").out)["figures"]
    for name in ("ttft_p95_ns", "peak_kv_bytes", "forgotten_tokens", "evicted_tokens"):
        assert again[name] == said["best"][name], name
    assert said["commands"]["record"].startswith("kvtape record ")
    assert f"--policy {said['best']['policy']}" in said["commands"]["record"]
    table = kvtape("tune", *asked, *TUNE).out
    assert "best of" in table
    assert said["commands"]["record"] in table


def test_times_are_in_ms_for_people_and_in_ns_for_programs(asked: list[object]) -> None:
    args = ["tune", *asked, "--budget", 256, "--trials", 2, "--policy", "stream", "--where", "ttft_p50<=1ns"]
    said = json.loads(kvtape(*args, "--json").out)
    assert said["nearest"]["missed"] == ["ttft_p50_ns<=1"]
    table = kvtape(*args).out
    assert "misses ttft_p50<=0.000001ms" in table
    assert "_ns" not in table
    facts = dict(line.split("\t") for line in table.splitlines()[2:4])
    assert float(facts["ttft_p95, ms"]) == pytest.approx(said["nearest"]["ttft_p95_ns"] / 1e6, rel=0.01)


def test_the_recorded_policy_is_recorded_again_by_the_command(asked: list[object], model: Path, tmp_path: Path) -> None:
    ran = kvtape("tune", *asked, *TUNE, "--policy", "stream", "--json")
    words = shlex.split(json.loads(ran.out)["commands"]["record"])
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"role": "user", "content": "hello"}\n', encoding="utf-8")
    there = {"M.gguf": str(model), "F.jsonl": str(chat), "NEW.duckdb": str(tmp_path / "new.duckdb")}
    done = kvtape(*(there.get(word, word) for word in words[1:]), "--decode", 2)
    assert done.code == 0, done.err


def test_where_the_log_has_attention_ranked_policies_are_searched_in_its_grain(
    asked: list[object], model: Path, tmp_path: Path
) -> None:
    log, text = tmp_path / "dense.duckdb", tmp_path / "text.txt"
    text.write_text("A promise about the future. " * 12, encoding="utf-8")
    record = ["record", "--model", model, "--backend", "llama:scores=on", "--text", text, "--n-ctx", 512, "--decode", 8]
    assert kvtape(*record, "--policy", "none", "--score-all", "--log", log).code == 0
    args = ["tune", log, *asked[1:], "--budget", "96:512", "--trials", 16, "--minimize", "peak_kv_bytes"]
    ran = kvtape(*args, "--where", "retained_mass>=0.9", "--json")
    assert ran.code == 0, ran.err
    said = json.loads(ran.out)
    assert said["best"]["retained_mass"] >= 0.9
    assert set(said["space"]) == {"none", "stream", "class", "h2o", "snapkv"}
    assert said["space"]["snapkv"]["window"] == ["32", "64"]
    ranked = [row for row in said["rows"] if row["policy"].startswith(("h2o", "snapkv"))]
    assert any(row["error"] is None for row in ranked)
    assert not [row["error"] for row in ranked if "attention" in (row["error"] or "")]
    only = json.loads(kvtape(*args, "--policy", "h2o", "--json").out)
    assert "--backend llama:scores=on" in only["commands"]["record"]


def test_where_nothing_is_feasible_the_code_is_1_and_the_nearest_is_shown(asked: list[object]) -> None:
    args = ["tune", *asked, "--budget", 256, "--trials", 8, "--where", "peak_kv_bytes<=1KiB"]
    ran = kvtape(*args, "--json")
    said = json.loads(ran.out)
    assert (ran.code, said["feasible"], said["best"], said["commands"]) == (1, False, None, None)
    assert said["nearest"]["missed"] == ["peak_kv_bytes<=1024"]
    table = kvtape(*args)
    assert table.code == 1
    assert "NOTHING that was tried meets not_served<=0 and peak_kv_bytes<=1024; nearest of" in table.out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--where", "peak_kv_bytes"], "write FIGURE<=BOUND"),
        (["--minimize", "speed"], "unknown figure"),
        (["--minimize", "ttft_p95", "--maximize", "served"], "give one of them"),
        (["--budget", "512:128"], "LOW <= HIGH"),
        (["--budget", "many"], "a number of tokens, or LOW:HIGH"),
        (["--budget", "2:" + "9" * 400], "LOW <= HIGH"),
        (["--slots", "99999999999999"], "at most 2147483647"),
        (["--where", "evicted<=0." + "0" * 400 + "1"], "is no number"),
        (["--policy", "opt"], "knows the future"),
        (["--policy", "lru"], "unknown policy"),
        (["--ray", "nowhere"], "choose local, auto, HOST:PORT"),
        (["--where", "retained_mass>=0.9"], "--score-all"),
        (["--policy", "h2o"], "no point can be simulated"),
    ],
)
def test_bad_input_is_one_line_and_code_2(asked: list[object], more: list[str], said: str) -> None:
    ran = kvtape("tune", *asked, "--budget", 256, "--trials", 2, *more)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert len(ran.err.strip().splitlines()) == 1


@pytest.mark.parametrize("verb", [["tune", *TUNE], ["whatif", *WHATIF]], ids=lambda verb: str(verb[0]))
def test_a_report_is_the_same_to_the_byte_whatever_made_it(asked: list[object], verb: list[object]) -> None:
    args = [verb[0], *asked, *verb[1:], "--json"]
    one = kvtape(*args)
    assert one.code == 0, one.err
    other = kvtape_process([*args, "--workers", 2], PYTHONHASHSEED="1")
    assert (other.out, other.err) == (one.out, "")


def test_points_on_slots_that_die(asked: list[object]) -> None:
    one = ["--policy", "stream", "--budget", 256, "--slots", 2, "--json"]
    rows = json.loads(kvtape("whatif", *asked, *one, "--slots", 1, "--slot-dies", "0", "--slot-dies", "0:1").out)[
        "rows"
    ]
    by_slots = {row["slots"]: row for row in rows}
    assert by_slots[2]["unserved"] == by_slots[2]["turns"] > 0
    assert "slot 1 cannot fail" in by_slots[1]["error"]
    link = ["--link", "1GiB", "--link-latency", 1.2345678]
    said = json.loads(kvtape("tune", *asked, *one, "--trials", 2, *link, "--slot-dies", "0").out)
    assert "(slot 0)" not in said["rules"]["slot_failures"]
    assert "at 0 s" in said["rules"]["slot_failures"]
    command = said["commands"]["simulate"]
    assert "--slot-dies 0" in command
    assert "--link 1GiB --link-latency 1.2345678" in command
    figures = json.loads(kvtape(*shlex.split(command)[1:], "--json").out)["figures"]
    assert (figures["slots_failed"], figures["ttft_p95_ns"]) == (1, said["best"]["ttft_p95_ns"])


def test_seeds_make_intervals_and_are_in_the_report(asked: list[object], tmp_path: Path) -> None:
    said = json.loads(kvtape("whatif", *asked, *WHATIF, "--json").out)
    assert (said["seeds"], said["seed"]) == (3, 2)
    assert all(set(row["intervals"]["ttft_p95_ns"]) == {"low", "high", "mean"} for row in said["rows"])
    assert "the same for all points" in said["rules"]["draws"]
    assert "front share" in kvtape("whatif", *asked, *WHATIF).out
    grid = tmp_path / "grid.json"
    grid.write_text('{"policy": ["stream", "class"], "budget": [256], "seeds": 3, "seed": 2}', encoding="utf-8")
    assert json.loads(kvtape("whatif", *asked, "--grid", grid, "--json").out) == said
    assert kvtape("whatif", *asked, "--grid", grid, "--seeds", 4).code == 2
    recorded = json.loads(kvtape("whatif", *asked, "--policy", "stream", "--budget", 256, "--json").out)
    assert (recorded["seeds"], recorded["seed"], recorded["rows"][0]["intervals"]) == (1, None, None)


def test_a_seed_of_nothing_is_refused(asked: list[object]) -> None:
    ran = kvtape("whatif", *asked, "--policy", "stream", "--budget", 256, "--seed", 2)
    assert (ran.code, "--seeds 2 or more" in ran.err) == (2, True)
