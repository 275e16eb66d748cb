"""What-ifs over a log that was recorded with `--score-all`, and what is said without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.command import kvtape
from support.recorded import TEXT
from support.tiny_gguf import write_tiny

POLICIES = ("none:block=16", "stream:block=16", "h2o:recent=24,block=16", "snapkv:block=16", "opt:block=16")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same text recorded with dense attention and without, and redacted."""
    folder = tmp_path_factory.mktemp("attention")
    model = write_tiny(folder / "tiny.gguf")
    (folder / "text.txt").write_text(TEXT[:330], encoding="utf-8")
    asked = ["record", "--model", model, "--backend", "llama", "--text", folder / "text.txt", "--chunk", 64]
    asked += ["--n-ctx", 512, "--decode", 40, "--policy", "none:block=16", "--content"]
    found = {name: folder / f"{name}.duckdb" for name in ("dense", "plain", "redacted")}
    assert kvtape(*asked, "--log", found["dense"], "--score-all", "--score-every", 16).code == 0
    assert kvtape(*asked, "--log", found["plain"]).code == 0
    assert kvtape("redact", found["dense"], "--out", found["redacted"]).code == 0
    return found


def whatif(log: Path, *options: object) -> dict[str, Any]:
    """At 128 tokens, evicts priced like a prefill where the log has none."""
    spec = "flops=1e11,bytes_per_s=1e10,params=1e5,weight_bytes=1e5,row_bytes=512"
    costs = log.with_name("roofline.json")
    assert kvtape("calibrate", "--roofline", spec, "--out", costs).code == 0
    policies = [part for policy in POLICIES for part in ("--policy", policy)]
    ran = kvtape("whatif", log, "--costs", costs, *policies, "--budget", 128, "--budget", 512, "--json", *options)
    assert ran.code == 0, ran.err
    body: dict[str, Any] = json.loads(ran.out)
    return body


def test_retained_mass_is_an_objective_where_the_log_has_attention(logs: dict[str, Path]) -> None:
    body = whatif(logs["dense"])
    rows = {(r["policy"].partition(":")[0], r["budget"]): r for r in body["rows"]}
    assert body["objectives"]["retained_mass"] == "more"
    assert [row["retained_mass"] for (_, budget), row in rows.items() if budget == 512] == [1.0] * 5
    for name in ("stream", "h2o", "snapkv", "opt"):
        assert 0 < rows[name, 128]["retained_mass"] <= rows[name, 128]["opt_retained_mass"] < 1
    assert not any(r["pareto"] for r in rows.values() if r["clairvoyant"])
    assert any("dense attention as recorded" in text for text in body["assumed"])
    assert "retained_mass" in body["rules"]


def test_a_redacted_log_has_it_too_for_attention_is_no_content(logs: dict[str, Path]) -> None:
    figures = ("retained_mass", "opt_retained_mass", "evicted_tokens")
    one, other = ([[row[f] for f in figures] for row in whatif(logs[name])["rows"]] for name in ("dense", "redacted"))
    assert one == other


def test_without_attention_scored_policies_are_rows_that_say_the_remedy(logs: dict[str, Path]) -> None:
    body = whatif(logs["plain"])
    refused = {r["policy"].partition(":")[0]: r["error"] for r in body["rows"] if r["error"]}
    assert set(refused) == {"h2o", "snapkv", "opt"}
    assert all("record --score-all" in error for error in refused.values())
    assert {r["retained_mass"] for r in body["rows"]} == {None}
    assert "retained_mass" not in body["objectives"]
    assert any("retained attention mass is not known" in text for text in body["assumed"])


def test_an_engine_does_not_know_the_future(logs: dict[str, Path]) -> None:
    folder = logs["dense"].parent
    asked = ["record", "--model", folder / "tiny.gguf", "--text", folder / "text.txt", "--log", folder / "opt.duckdb"]
    ran = kvtape(*asked, "--backend", "llama:scores=on", "--n-ctx", 256, "--policy", "opt:budget=128")
    assert ran.code == 2
    assert "only a recording does" in ran.err
    assert not (folder / "opt.duckdb").exists()
