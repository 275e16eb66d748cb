"""`kvtape certify`: rows kept as they are finished, a run that goes on where it was interrupted, rows in a log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtape.backends.proofs.rows import ProofRow
from kvtape.backends.proofs.store import read_rows
from kvtape.backends.registry import open_engine
from kvtape.eval.certification.catalog import Knob
from kvtape.eval.certification.certifying import Certifier
from kvtape.eval.certification.smoke import Sizes
from kvtape.traces.reader import open_log
from support import llama_tiny
from support.command import kvtape

pytestmark = pytest.mark.contract("I5")

SIZES = Sizes(context=16, scored=8, needles=0, range_tokens=96, shift_tokens=264, shift_scored=4, chunk=64)


@pytest.fixture(autouse=True)
def proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "own" / "proofs.json"
    monkeypatch.setenv("KVTAPE_PROOFS", str(path))
    monkeypatch.setattr("kvtape.cli.certification.FULL", SIZES)
    monkeypatch.setattr("kvtape.cli.certification.QUICK", SIZES)
    return path


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in this process, which start at once."""
    monkeypatch.setattr("kvtape.cli.certification.open_isolated", open_engine)


@pytest.fixture(scope="module")
def model() -> Path:
    return llama_tiny.model_file("llama", n_embd=128, n_head=2, n_head_kv=1)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The knobs that were really measured."""
    asked: list[str] = []
    certify = Certifier.certify

    def watched(self: Certifier, knob: Knob) -> list[ProofRow]:
        asked.append(knob.asked)
        return certify(self, knob)

    monkeypatch.setattr(Certifier, "certify", watched)
    return asked


def certify(model: Path, *args: object) -> tuple[int, dict[str, Any]]:
    ran = kvtape("certify", "--model", model, "--json", *args)
    return ran.code, json.loads(ran.out) if ran.out else {"err": ran.err}


def test_rows_are_kept_told_and_logged_and_not_measured_twice(
    model: Path, proofs: Path, tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "certified.duckdb"
    asked = ("--kv-type", "q8_0", "--flash", "off", "--flash", "on", "--log", log)
    code, body = certify(model, *asked)
    assert code == 0, body
    assert [(r["subject"], r["verdict"]) for r in body["rows"]] == [
        ("k=q8_0,v=q8_0,fa=off", "refused"),
        ("k=q8_0,v=q8_0,fa=on", "pass"),
    ]
    assert set(body["rows"][1]["abilities"].values()) == {"pass"}
    kept = read_rows(proofs)
    assert [r.subject for r in kept] == [r["subject"] for r in body["rows"]]
    assert measured == [r.subject for r in kept]

    assert "no session in it" in kvtape("show", log).err
    with open_log(log) as tape:
        sql = "SELECT subject, verdict FROM certifications WHERE ability IS NULL ORDER BY certification"
        assert tape.sql(sql)[1] == [(r.subject, r.verdict) for r in kept]
        numbers = "SELECT ability, measure, value FROM certifications WHERE ability IS NOT NULL ORDER BY certification"
        assert tape.sql(numbers)[1] == [(m.ability, m.name, m.value) for r in kept for m in r.measures]

    monkeypatch.setattr("kvtape.cli.certification.open_isolated", open_engine)
    code, again = certify(model, *asked[:-2])
    assert (code, again["rows"]) == (0, body["rows"])
    assert len(measured) == 2
    assert read_rows(proofs) == kept
    code, _ = certify(model, *asked[:2], "--flash", "off", "--again")
    assert len(measured) == 3


@pytest.mark.usefixtures("here")
def test_an_interrupted_run_loses_only_the_row_in_work(
    model: Path, proofs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[str]
) -> None:
    log = tmp_path / "certified.duckdb"
    asked = ("--kv-type", "q4_0", "--kv-type", "q5_0/f16", "--flash", "off")
    certify_one = Certifier.certify

    def interrupted(self: Certifier, knob: Knob) -> list[ProofRow]:
        if knob.k == "q5_0":
            raise KeyboardInterrupt
        return certify_one(self, knob)

    with monkeypatch.context() as patched:
        patched.setattr(Certifier, "certify", interrupted)
        assert certify(model, *asked, "--log", log)[0] == 130
    assert [r.subject for r in read_rows(proofs)] == ["k=q4_0,v=q4_0,fa=off"]
    assert kvtape("verify", log).code == 0
    measured.clear()
    code, body = certify(model, *asked)
    assert measured == ["k=q5_0,v=f16,fa=off"]
    assert [r["verdict"] for r in body["rows"]] == ["refused", "pass"], (code, body)


@pytest.mark.usefixtures("here")
def test_quick_prints_and_keeps_nothing(model: Path, proofs: Path) -> None:
    code, body = certify(model, "--kv-type", "bf16", "--flash", "off", "--quick")
    assert (code, body["kept"]) == (0, None)
    assert not proofs.exists()


@pytest.mark.usefixtures("here")
def test_rows_of_another_document(model: Path, proofs: Path, tmp_path: Path) -> None:
    out = tmp_path / "other.json"
    code, body = certify(model, "--kv-type", "q4_0", "--flash", "off", "--out", out)
    assert (code, body["kept"]) == (0, str(out))
    assert len(read_rows(out)) == 1
    assert not proofs.exists()


@pytest.mark.usefixtures("here")
def test_what_a_shipped_row_says_is_not_measured_again(
    model: Path, proofs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[str]
) -> None:
    asked = ("certify", "--model", model, "--kv-type", "q4_0", "--flash", "off")
    first = kvtape(*asked)
    assert f"certifying 1 settings of {model.name} on llama" in first.err
    assert first.err.index("fa=off: measuring") < first.err.index("fa=off: refused")
    rows = read_rows(proofs)
    proofs.unlink()
    shipped = rows
    monkeypatch.setattr("kvtape.backends.proofs.store.shipped_rows", lambda: shipped)
    monkeypatch.setattr("kvtape.cli.certification.shipped_rows", lambda: shipped)
    again = kvtape(*asked)
    assert (again.code, again.out) == (first.code, first.out)
    assert "1 have a row already" in again.err
    assert "by a row that comes with kvtape" in again.err
    assert "measuring" not in again.err
    assert len(measured) == 1
    assert not proofs.exists()
    kvtape(*asked, "--out", tmp_path / "of-its-own.json")
    kvtape(*asked, "--again")
    assert len(measured) == 3
    shipped = tuple(row.model_copy(update={"machine": "another"}) for row in rows)
    proofs.unlink()
    kvtape(*asked)
    assert len(measured) == 4, "a row of another class of machine says nothing here"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--backend", "reference"), "no precision knob"),
        (("--kv-type", "a/b/c"), "write a type"),
        (("--flash", "yes"), "choose off, on, auto"),
        (("--quick", "--out", "x.json"), "give one of them"),
        (("--backend", "openvino", "--flash", "on"), "no flash attention"),
    ],
)
def test_what_cannot_be_asked_is_one_line_and_exit_2(model: Path, args: tuple[str, ...], said: str) -> None:
    ran = kvtape("certify", "--model", model, *args)
    assert ran.code == 2
    assert said in ran.err
    assert len(ran.err.strip().splitlines()) == 1


@pytest.mark.usefixtures("here")
def test_a_short_text_and_a_damaged_document(model: Path, proofs: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short")
    ran = kvtape("certify", "--model", model, "--text", text)
    assert (ran.code, "longer --text" in ran.err) == (2, True)
    proofs.parent.mkdir()
    proofs.write_text("{")
    ran = kvtape("certify", "--model", model)
    assert (ran.code, "proofs.json" in ran.err) == (2, True)


@pytest.mark.usefixtures("here")
def test_people_read_a_table(model: Path) -> None:
    out = kvtape("certify", "--model", model, "--kv-type", "q4_0", "--flash", "off").out
    assert "knob\tverdict\tbytes/token" in out
    assert "k=q4_0,v=q4_0,fa=off\trefused" in out
