"""`kvtape doctor`: what works, what is missing, and an engine that takes its process down."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvtape.backends.proofs.machine import machine_class
from kvtape.backends.proofs.rows import Ability, Measure, ProofRow, Verdict
from kvtape.backends.proofs.store import add_rows
from kvtape.backends.registry import open_engine
from kvtape.cli import doctor
from support.command import kvtape


def test_both_engines_work_on_the_tiny_model(model: Path) -> None:
    ran = kvtape("doctor", "--model", model, "--json")
    assert ran.code == 0, ran.out
    body = json.loads(ran.out)
    assert body["machine"]["duckdb"]
    assert [e["name"] for e in body["engines"]] == ["llama", "openvino"]
    for engine in body["engines"]:
        assert engine["installed"]
        assert engine["works"]
        assert engine["capabilities"]["remove_middle"] is True
        assert set(engine["refusals"]) == {k for k, v in engine["capabilities"].items() if v is False}


def test_people_read_why_a_capability_is_not_there(model: Path) -> None:
    out = kvtape("doctor", "--model", model).out
    assert "# why not" in out
    assert "attention_scores" in out


def test_it_lists_the_precisions_that_passing_rows_advertise(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVTAPE_PROOFS", str(tmp_path / "proofs.json"))
    engine = open_engine("llama", model)
    fingerprint, version = engine.facts.fingerprint, engine.version
    engine.close()

    def row(subject: str, verdict: Verdict, **changed: str) -> ProofRow:
        abilities: tuple[Ability, ...] = ("quality", "round_trip", "snapshot", "shift")
        verdicts: dict[Ability, Verdict] = {"quality": verdict, "shift": "fail"}
        measures = [Measure(ability=a, name="x", verdict=verdicts.get(a, "pass")) for a in abilities]
        facts = {"fingerprint": fingerprint, "engine": "llama", "engine_version": version, "machine": machine_class()}
        rest = {"kind": "certification", "model": "m", "day": "2026-11-30", "subject": subject, "verdict": verdict}
        return ProofRow.model_validate({**facts, **rest, **changed, "measures": measures})

    knob = "k=q8_0,v=q8_0,fa=on"
    add_rows([row(knob, "pass"), row("k=q4_0,v=q4_0,fa=on", "fail"), row("k=f16,v=f16,fa=on", "pass", machine="m")])
    monkeypatch.setattr(doctor, "ENGINES", {"llama": doctor.ENGINES["llama"]})
    out = kvtape("doctor", "--model", model).out
    rows = [line for line in out.splitlines() if line.startswith("llama\tk=")]
    assert [line for line in rows if "base" not in line] == [f"llama\t{knob}\t2026-11-30\tposition_shift"]
    assert "llama\tk=f16,v=f16,fa=off\tbase\t" in rows


def test_a_model_that_no_engine_takes(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(100))
    ran = kvtape("doctor", "--model", bad, "--json")
    assert ran.code == 3
    for engine in json.loads(ran.out)["engines"]:
        assert not engine["works"]
        assert "bad.gguf" in engine["remedy"]


def test_an_engine_that_is_not_installed_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "ENGINES", {"llama": ("llama_cpp", "x")})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = kvtape("doctor", "--json")
    assert ran.code == 0
    (engine,) = json.loads(ran.out)["engines"]
    assert engine["installed"] is False
    assert "kvtape[llama]" in engine["remedy"]


def test_an_engine_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> None:
    """An abort inside the engine ends the probe's process, not the doctor."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'assertion failed' >&2\nkill -ABRT $$\n", encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    ran = kvtape("doctor", "--model", model, "--json")
    assert ran.code == 3
    assert "died of signal 6: assertion failed" in json.loads(ran.out)["engines"][0]["remedy"]
