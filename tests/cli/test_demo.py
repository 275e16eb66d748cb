"""The demo: its script on a tiny model, and the whole command on the real one."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from itertools import takewhile
from pathlib import Path

import pytest

from kvtape.cli import demo, demo_record, demo_results
from kvtape.cli.demo_script import Material
from kvtape.planner.events import Op
from kvtape.sim.costs.model import read_costs
from kvtape.traces.reader import open_log
from support.command import kvtape
from support.read_svg import read_svg
from support.repository import ROOT
from support.tiny_gguf import write_tiny

LATER_OPS = {Op.LOST}
FILES = [
    "answers.json",
    "costs.json",
    "curve.json",
    "demo.duckdb",
    "demo.duckdb.head.json",
    "kvtape.key",
    "map.svg",
    "replay.json",
    "report.html",
    "whatif.json",
]


def check_log(log: Path) -> None:
    """Every kind of event, content on record, the first session closed, the second dead of its decode."""
    with open_log(log) as tape:
        run_id = tape.default_run().run_id
        sessions = tape.sessions(run_id)
        events = {row.session_id: tape.events(run_id, row.session_id) for row in sessions}
        states = {row.session_id: tape.state_at(run_id, row.session_id) for row in sessions}
    assert list(events) == ["essay", "notes"]
    assert all(row.content for row in sessions)
    seen = Counter(event.op for found in events.values() for event in found)
    assert set(seen) == set(Op) - LATER_OPS
    assert {str(e.way) for e in events["essay"] if e.op == "evict"} == {"gap", "rebased"}
    assert (states["essay"].closed, states["essay"].fatal) == (True, None)
    assert states["notes"].fatal == "decode_failed"
    assert seen[Op.ADMIT] >= 3
    assert seen[Op.REFUSE] == 1


@pytest.fixture
def short_material(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as the real tokenizer gives; the tiny model's has one for each byte."""
    whole = demo_record._material

    def cut(engine: object) -> Material:
        material = whole(engine)  # type: ignore[arg-type]
        return Material(material.essay[:3300], material.question[:16], material.meant[:16])

    monkeypatch.setattr(demo_record, "_material", cut)


@pytest.mark.usefixtures("short_material")
def test_the_storage_type_that_is_asked_for_is_on_record(tmp_path: Path) -> None:
    model, log = write_tiny(tmp_path / "tiny.gguf", n_ctx=8192), tmp_path / "demo.duckdb"
    demo_record.record_demo(log, model, 1, "f32/f16")
    check_log(log)
    with open_log(log) as tape:
        run = tape.default_run()
        assert {(row.kv_type_k, row.kv_type_v) for row in tape.sessions(run.run_id)} == {("f32", "f16")}
    refused = kvtape("demo", "--out", tmp_path / "out", "--model", model, "--kv-type", "q8_0/f16")
    assert refused.code == 2
    assert "kvtape certify --model" in refused.err


@pytest.mark.usefixtures("short_material")
def test_the_demo_on_a_tiny_model(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", n_ctx=8192)
    out = tmp_path / "out"
    first = kvtape("demo", "--out", out, "--model", model, "--json")
    assert first.code == 0, first.err
    assert sorted(p.name for p in out.iterdir()) == FILES
    check_log(out / "demo.duckdb")
    assert kvtape("verify", out / "demo.duckdb").code == 0
    body = json.loads(first.out)
    assert body["replay"]["equal"] is True
    assert [b["name"] for b in body["replay"]["backends"]] == list(demo.REPLAY_ON)
    assert len(body["answers"]) == 3
    assert all(answer["rows"] for answer in body["answers"].values())
    for verb in ("replay", "whatif", "curve"):
        written = json.loads((out / f"{verb}.json").read_text(encoding="utf-8"))
        assert written["schema"] == f"kvtape.{verb}/1"
        assert body[verb].items() <= written.items()
    recorded = body["whatif"]["recorded"]
    assert (recorded["equal"], recorded["difference"]) == (True, None)
    assert recorded["residency_events"] > 50
    notes = body["whatif"]["notes"]["rows"]
    assert len(notes) == 6
    assert all(0 < row["retained_mass"] <= row["opt_retained_mass"] < 1 for row in notes)
    assert [row["clairvoyant"] for row in notes] == [False] * 4 + [True] * 2
    assert len(body["whatif"]["rows"]) == 6
    assert any(row["pareto"] for row in body["whatif"]["rows"])
    assert read_costs(out / "costs.json").origin.backend == "llama"
    # A second demo replaces the first, and the run is the same.
    again = kvtape("demo", "--out", out, "--model", model, "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["digest"] == body["digest"]


def test_the_demo_without_an_engine_says_what_is_modelled(tmp_path: Path) -> None:
    ran = kvtape("demo", "--modelled", "--out", tmp_path, "--json")
    assert ran.code == 0, ran.err
    body = json.loads(ran.out)
    made = [name for name in FILES if name not in ("kvtape.key", "replay.json")]
    assert sorted(p.name for p in tmp_path.iterdir()) == made
    check_log(tmp_path / "demo.duckdb")
    assert kvtape("verify", tmp_path / "demo.duckdb").code == 0
    assert (body["modelled"], body["whatif"]["recorded"]["equal"]) == (True, True)
    assert body["whatif"]["recorded"]["residency_events"] == 53
    assert "replay" not in body
    assert sorted(body["answers"]) == sorted(demo_results.QUESTIONS)
    assert read_costs(tmp_path / "costs.json").origin.backend == "llama"
    rates = {(row["policy"], row["budget_blocks"]): row["hit_rate"] for row in body["curve"]["rows"]}
    assert all(rates["opt", budget] >= rate for (_, budget), rate in rates.items())
    assert read_svg((tmp_path / "map.svg").read_text(encoding="utf-8")).title.startswith("What was resident")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "stream:sink=4,recent=508" in page
    report = {name: (tmp_path / name).read_bytes() for name in made}
    told = kvtape("demo", "--modelled", "--out", tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in made} == report
    assert "No engine ran here" in told.out
    assert told.out.splitlines()[-5].startswith(f"the report: {tmp_path / 'report.html'}")
    page = (ROOT / "docs" / "example.md").read_text(encoding="utf-8")
    assert f"logical digest {body['digest']}" in page
    timed = {"# Why was": 0, "# What did each operation": 1, "# What did each plan": 1, "# hit rate": 0}
    for title, n in timed.items():
        assert rows_under(title, page, n) == rows_under(title, told.out, n)


def rows_under(title: str, text: str, timed: int) -> list[list[str]]:
    """The table behind a title, without its last columns, which are times; fails without one."""
    lines = f"\n{text}".partition(f"\n{title}")[2].splitlines()[1:]
    rows = [line.split("\t") for line in takewhile(lambda line: "\t" in line, lines)]
    assert len(rows) > 3
    return [row[: len(row) - timed] for row in rows]


def test_what_it_says_to_try_next_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"timestamp": 0, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2]}
    (tmp_path / "trace.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    ran = kvtape("demo", "--modelled", "--out", "out")
    commands = [line.strip() for line in ran.out.splitlines()[-3:]]
    assert [shlex.split(c)[:2] for c in commands] == [["kvtape", "show"], ["kvtape", "sql"], ["kvtape", "whatif"]]
    for command in commands:
        tried = kvtape(*shlex.split(command)[1:])
        assert tried.code == 0, tried.err
        assert tried.out


def test_the_demo_without_an_engine_takes_no_model(model: Path, tmp_path: Path) -> None:
    for more in (("--model", model), ("--threads", 1)):
        ran = kvtape("demo", "--modelled", "--out", tmp_path / "out", *more)
        assert ran.code == 2
        assert "leave out" in ran.err
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x", encoding="utf-8")
    ran = kvtape("demo", "--out", tmp_path / "out")
    assert ran.code == 2
    assert "--out" in ran.err


def test_a_missing_engine_is_named_before_anything_is_recorded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "openvino" else name)
    ran = kvtape("demo", "--out", tmp_path / "out", "--model", model)
    assert ran.code == 3
    assert "kvtape[openvino]" in ran.err
    assert not (tmp_path / "out").exists()


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    for name in ("demo.duckdb", "demo.duckdb.wal", "replay.json", "notes.txt", "demo.txt"):
        (tmp_path / name).write_text("x", encoding="utf-8")
    demo_results.fresh(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["demo.txt", "notes.txt"]


@pytest.mark.real
@pytest.mark.timeout(1500)
def test_the_demo_on_the_real_model(tmp_path: Path) -> None:
    ran = kvtape("demo", "--out", tmp_path, "--json")
    assert ran.code == 0, ran.err
    check_log(tmp_path / "demo.duckdb")
    body = json.loads(ran.out)
    with open_log(tmp_path / "demo.duckdb") as tape:
        _, rows = tape.sql(
            "SELECT sum(n_tokens) FROM events WHERE session_id = 'essay' AND turn = 1 AND op = 'prefill'"
        )
    assert rows[0][0] >= 3000
    for backend in body["replay"]["backends"]:
        assert backend["witness_positions"] == backend["residency_events"] > 40
        assert backend["witness_identities"] > 10_000
        assert backend["checkpoints"] >= 40
        assert backend["mean_kl"] <= 0.01
        assert backend["top1"] >= 0.9
