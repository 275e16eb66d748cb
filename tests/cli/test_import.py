"""`kvtape import`: what it prints, its exit codes, and that every reading verb takes what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

from support.command import kvtape, kvtape_process
from support.repository import ROOT

ROW = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}\n'


def test_import_says_what_it_read_and_other_verbs_read_the_log(tmp_path: Path) -> None:
    source, log = tmp_path / "trace.jsonl", tmp_path / "log.duckdb"
    source.write_text(ROW + ROW + ROW.replace("600", "1000"))
    ran = kvtape("import", source, "--log", log, "--json")
    assert ran.code == 0, ran.err
    body = json.loads(ran.out)
    assert {k: body[k] for k in ("format", "rows", "sessions", "events", "duplicates", "folded", "span_s")} == {
        "format": "mooncake",
        "rows": 3,
        "sessions": 3,
        "events": 12,
        "duplicates": 1,
        "folded": 0,
        "span_s": 0.0,
    }
    assert (body["schema"], body["digest_kind"]) == ("kvtape.import/1", "logical")
    assert [(w["kind"], w["count"], w["line"]) for w in body["warnings"]] == [("duplicate_rows", 1, 2)]
    assert "line 2: rows that were there before" in ran.err

    assert json.loads(kvtape("verify", log, "--json").out)["ok"]
    shown = json.loads(kvtape("show", log, "--session", "line-0000003", "--json").out)
    assert shown["digest"] == body["digest"]
    (session,) = shown["sessions"]
    assert (session["n_ctx"], session["turn"], session["closed"]) == (None, 1, True)
    assert "of unknown" in kvtape("show", log).out
    assert kvtape("sql", log, "SELECT sum(prompt_tokens) FROM turns").out.split()[-1] == "2200"
    assert kvtape("diff", log, log).code == 0
    replayed = kvtape("replay", log, "--on", "llama")
    assert (replayed.code, "names no model" in replayed.err) == (2, True)


def test_bad_input_is_exit_2_with_file_line_field_and_remedy(tmp_path: Path) -> None:
    source = tmp_path / "trace.jsonl"
    source.write_text(ROW + ROW.replace("[7, 8]", "[7, 8.5]"))
    ran = kvtape("import", source, "--log", tmp_path / "log.duckdb")
    assert (ran.code, ran.out) == (2, "")
    assert f"{source}, line 2, hash_ids[1]: expected int, got float; " in ran.err
    assert ran.err.endswith("nothing was imported\n")
    assert [p.name for p in tmp_path.iterdir()] == ["trace.jsonl"]


def test_a_log_that_is_there_or_has_no_folder_is_refused_before_reading(tmp_path: Path) -> None:
    taken = tmp_path / "log.duckdb"
    taken.write_text("mine")
    for log in (taken, tmp_path / "none" / "log.duckdb"):
        ran = kvtape("import", tmp_path / "missing.jsonl", "--log", log)
        assert (ran.code, str(log.name if log == taken else log.parent) in ran.err) == (2, True)
    assert taken.read_text() == "mine"


def test_import_from_stdin(tmp_path: Path) -> None:
    ran = kvtape_process(["import", "-", "--log", tmp_path / "log.duckdb", "--json"], stdin=ROW.encode())
    assert (ran.code, json.loads(ran.out)["rows"]) == (0, 1)


ROOFLINE = "flops=1e12,bytes_per_s=5e10,params=1e9,weight_bytes=2e9,row_bytes=20000"


def test_requests_and_servers_logs_can_be_asked_what_if(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    assert kvtape("calibrate", "--roofline", ROOFLINE, "--out", costs).code == 0
    more = ["--costs", costs, "--policy", "none", "--policy", "stream", "--budget", "1024", "--json"]
    for name, served in (("requests.jsonl", [1, 12]), ("server.log", [4, 4])):
        log = tmp_path / f"{name}.duckdb"
        assert kvtape("import", ROOT / "examples" / "traces" / name, "--log", log).code == 0
        ran = kvtape("whatif", log, *more)
        assert ran.code == 0, ran.err
        assert [point["served"] for point in json.loads(ran.out)["rows"]] == served, ran.out
    events = tmp_path / "events.duckdb"
    assert kvtape("import", ROOT / "examples" / "traces" / "kv_events.jsonl", "--log", events).code == 0
    ran = kvtape("whatif", events, *more)
    assert (ran.code, ran.out, "has no prompt; there is nothing to simulate" in ran.err) == (2, "", True)
