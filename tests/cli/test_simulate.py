"""`kvtape calibrate`, `simulate` and `whatif` on a log of a real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtape.planner.residency import RESIDENCY_OPS
from kvtape.traces.reader import open_log
from kvtape.traces.sidecar import head_path
from support.command import kvtape, kvtape_process


@pytest.fixture(scope="module")
def costs(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    ran = kvtape("calibrate", log, "--out", path, "--plot", path.with_suffix(".svg"), "--machine", "here", "--json")
    assert ran.code == 0, ran.err
    said = json.loads(ran.out)
    assert said["origin"]["backend"] == "llama"
    assert {"prefill", "decode", "evict", "export", "plan", "session"} <= set(said["kinds"])
    assert path.with_suffix(".svg").read_text(encoding="utf-8").startswith("<svg")
    return path


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty requests of a serving trace, half a second apart, every second one with the first one's beginning."""
    folder = tmp_path_factory.mktemp("fleet")
    rows = [
        {"timestamp": 500 * i, "input_length": 1024, "output_length": 20, "hash_ids": [0 if i % 2 else i + 1, i + 50]}
        for i in range(20)
    ]
    trace = folder / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    ran = kvtape("import", trace, "--format", "mooncake", "--log", folder / "fleet.duckdb")
    assert ran.code == 0, ran.err
    return folder / "fleet.duckdb"


@pytest.fixture(scope="module")
def fleet_costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("roof") / "costs.json"
    spec = "flops=1e12,bytes_per_s=1e11,params=1e9,weight_bytes=1e9,row_bytes=1000"
    assert kvtape("calibrate", "--roofline", spec, "--out", path).code == 0
    return path


def held(log: Path) -> list[Any]:
    with open_log(log) as tape:
        events = tape.events(tape.default_run().run_id, "main")
    return [(e.op, e.start, e.stop, e.resident_digest, e.layout_digest) for e in events if e.op in RESIDENCY_OPS]


def test_a_simulated_log_holds_what_the_engine_held_and_verifies(log: Path, costs: Path, tmp_path: Path) -> None:
    out = tmp_path / "simulated.duckdb"
    ran = kvtape("simulate", log, "--costs", costs, "--log", out, "--json")
    assert ran.code == 0, ran.err
    said = json.loads(ran.out)
    assert said["figures"]["served"] == said["figures"]["turns"] == 1
    assert held(out) == held(log)
    assert kvtape("verify", out).code == 0
    assert kvtape("sql", out, "SELECT * FROM turns").code == 0
    with open_log(out) as tape:
        run = tape.default_run()
        assert (run.kind, tape.sessions()[0].backend) == ("simulation", "modelled")
        assert json.loads(run.config)["parent_digest"] == said["source_digest"]
        assert tape.logical_digest() == said["run_digest"]
    assert kvtape("calibrate", out).code == 2


def test_a_simulation_run_again_is_the_same_to_the_byte(log: Path, costs: Path, tmp_path: Path) -> None:
    runs = [kvtape("simulate", log, "--costs", costs, "--policy", "none", "--n-ctx", 2048, "--json") for _ in range(2)]
    assert runs[0].out == runs[1].out
    logs = [tmp_path / "1.duckdb", tmp_path / "2.duckdb"]
    said = [json.loads(kvtape("simulate", log, "--costs", costs, "--log", path, "--json").out) for path in logs]
    assert [body.pop("log") for body in said] == [str(path) for path in logs]
    assert said[0] == said[1]
    assert kvtape("diff", *logs).code == 0


def test_whatif_marks_a_front_and_says_what_cannot_be(log: Path, costs: Path) -> None:
    args = ["whatif", log, "--costs", costs, "--policy", "none", "--policy", "class", "--policy", "h2o:recent=4"]
    ran = kvtape(*args, "--budget", 256, "--budget", 1024, "--json")
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out)["rows"]
    assert len(rows) == 6
    assert any(row["pareto"] for row in rows)
    assert [row["error"] is None for row in rows] == [True, True, True, True, False, False]
    assert rows[0]["not_served"] == 1
    table = kvtape(*args, "--budget", 1024)
    assert "cannot be" in table.out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--policy", "lru:budget=3"], "unknown policy"),
        (["--slots", "0"], "slot"),
        (["--link", "0"], "moves nothing"),
        (["--link", "fast"], "--link"),
        (["--pace", "0"], "pace"),
        (["--pace", "nan"], "pace"),
        (["--arrivals", "never"], "arrivals"),
        (["--memory", "0"], "memory"),
    ],
)
def test_bad_input_is_one_line_and_code_2(log: Path, costs: Path, more: list[str], said: str) -> None:
    ran = kvtape("simulate", log, "--costs", costs, *more)
    assert ran.code == 2
    assert said in ran.err
    assert len(ran.err.strip().splitlines()) == 1


def test_costs_of_another_model_are_refused(log: Path, costs: Path, tmp_path: Path) -> None:
    other = json.loads(costs.read_text(encoding="utf-8"))
    other["origin"]["threads"] = 77
    path = tmp_path / "other.json"
    path.write_text(json.dumps(other), encoding="utf-8")
    ran = kvtape("simulate", log, "--costs", path)
    assert (ran.code, "threads 77" in ran.err) == (2, True)


def test_a_simulation_that_fails_leaves_no_log(log: Path, costs: Path, tmp_path: Path) -> None:
    fewer = json.loads(costs.read_text(encoding="utf-8"))
    del fewer["kinds"]["decode"]
    path, out = tmp_path / "fewer.json", tmp_path / "out.duckdb"
    path.write_text(json.dumps(fewer), encoding="utf-8")
    ran = kvtape("simulate", log, "--costs", path, "--log", out)
    assert (ran.code, "say nothing of decode" in ran.err) == (2, True)
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith("out")]


def test_a_roofline_needs_no_log_and_says_that_it_is_hypothetical(log: Path, tmp_path: Path) -> None:
    path = tmp_path / "roof.json"
    spec = "flops=1e11,bytes_per_s=2e10,params=1.3e8,weight_bytes=1.4e8,row_bytes=23040"
    ran = kvtape("calibrate", "--roofline", spec, "--out", path)
    assert ran.code == 0, ran.err
    assert "HYPOTHETICAL" in ran.out
    simulated = json.loads(kvtape("simulate", log, "--costs", path, "--json").out)
    assert any("hypothetical" in text for text in simulated["assumed"])
    assert kvtape("calibrate").code == 2
    assert kvtape("calibrate", log, "--roofline", spec).code == 2
    twice = kvtape("calibrate", log, log)
    assert (twice.code, "given twice" in twice.err) == (2, True)


def test_a_sample_of_the_events_is_a_log_like_any(fleet: Path, fleet_costs: Path, tmp_path: Path) -> None:
    machine = ["--costs", fleet_costs, "--policy", "none", "--n-ctx", 4096, "--slots", 3]
    ran = kvtape("simulate", fleet, *machine, "--json")
    assert ran.code == 0, ran.err
    out = tmp_path / "sampled.duckdb"
    sampled = kvtape("simulate", fleet, *machine, "--log", out, "--sample-sessions", "0.2", "--json")
    assert sampled.code == 0, sampled.err
    every, some = json.loads(ran.out), json.loads(sampled.out)
    assert every["figures"] == some["figures"]
    assert "of 4 of 20 conversations" in some["rules"]["events"]
    with open_log(out) as tape:
        names = {row.session_id.partition("~")[0] for row in tape.sessions()}
        assert json.loads(tape.default_run().config)["sample"] == {"count": None, "seed": 0, "share": 0.2}
    assert len(names) == 4
    for verb in (["verify", out], ["show", out], ["sql", out, "SELECT * FROM why_prefilled"]):
        assert kvtape(*verb).code == 0
    assert kvtape("simulate", fleet, *machine, "--sample", 2).code == 2


def test_slots_that_all_die_are_a_counted_outcome(fleet: Path, fleet_costs: Path, tmp_path: Path) -> None:
    machine = ["--costs", fleet_costs, "--policy", "none", "--n-ctx", 4096, "--slots", 2]
    out = tmp_path / "died.duckdb"
    ran = kvtape("simulate", fleet, *machine, "--slot-dies", "2", "--slot-dies", "4:1", "--log", out, "--json")
    assert ran.code == 0, ran.err
    body = json.loads(ran.out)
    figures = body["figures"]
    assert figures["slots_failed"] == 2
    assert figures["served"] + figures["unserved"] == figures["turns"] == 20
    assert figures["unserved"] > 0
    assert any("no slot is left" in (t["why"] or "") for t in body["turns"])
    assert kvtape("verify", out).code == 0
    again = kvtape("simulate", fleet, *machine, "--slot-dies", "2", "--slot-dies", "4:1")
    assert "no slot is left: 2 have failed" in again.out
    assert kvtape("simulate", fleet, *machine, "--slot-dies", "1:2").code == 2


def test_other_processes_and_hash_seeds_give_the_same_events(fleet: Path, fleet_costs: Path, tmp_path: Path) -> None:
    machine = ["--costs", fleet_costs, "--policy", "stream:sink=4,recent=252", "--n-ctx", 512, "--cold-tokens", 512]
    machine += ["--slots", 3, "--link", "100MB", "--pace", "1.7", "--slot-dies", "1.5", "--sample", 5]
    said = []
    for seed in ("0", "1"):
        out = tmp_path / "out.duckdb"
        ran = kvtape_process(["simulate", fleet, *machine, "--log", out, "--json"], PYTHONHASHSEED=seed)
        assert ran.code == 0, ran.err
        said.append(json.loads(ran.out))
        out.unlink()
        head_path(out).unlink()
    assert said[0] == said[1]
    assert said[0]["run_digest"]
