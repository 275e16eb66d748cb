"""Precisions on the command line: refused without a proof, opened on request, and shown as what they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command import kvtape

pytestmark = pytest.mark.contract("I5")


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVTAPE_PROOFS", str(tmp_path / "proofs.json"))
    path = tmp_path / "text.txt"
    path.write_text("A cache is a promise about the future.")
    return path


def test_record_refuses_before_there_is_a_log_and_opens_uncertified(model: Path, text: Path, tmp_path: Path) -> None:
    log = tmp_path / "l.duckdb"
    asked = ("record", "--model", model, "--text", text, "--log", log, "--decode", 2, "--flash", "on")
    ran = kvtape(*asked)
    assert ran.code == 2
    assert f"kvtape certify --model {model} --backend llama --kv-type f16 --flash on" in ran.err
    assert not log.exists()
    assert kvtape(*asked, "--uncertified").code == 0
    [shown] = json.loads(kvtape("show", log, "--json").out)["sessions"]
    assert shown["precision"] == {"knob": "k=f16,v=f16,fa=on", "certified": False}
    assert "k=f16,v=f16,fa=on, uncertified" in kvtape("show", log).out
    replayed = kvtape("replay", log, "--on", "llama", "--model", model, "--json")
    assert json.loads(replayed.out)["equal"], replayed.err


def test_a_base_precision_shows_nothing(log: Path) -> None:
    [shown] = json.loads(kvtape("show", log, "--json").out)["sessions"]
    assert shown["precision"] is None
    assert "precision" not in kvtape("show", log).out


def test_eval_refuses_before_there_is_a_log_and_opens_uncertified(model: Path, text: Path, tmp_path: Path) -> None:
    log = tmp_path / "e.duckdb"
    asked = ("eval", "--task", "nll", "--model", model, "--backend", "llama", "--text", text, "--log", log)
    asked += ("--kv-type", "bf16")
    ran = kvtape(*asked)
    assert (ran.code, "--kv-type bf16 --flash off" in ran.err) == (2, True)
    assert not log.exists()
    assert kvtape(*asked, "--uncertified").code == 0
