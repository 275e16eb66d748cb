"""`kvtape gate` on a tiny model: the rows it keeps, the log it writes, and every wrong option in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtape.backends.proofs.store import add_rows, read_rows
from kvtape.backends.speculation.artifacts import add_artifact
from kvtape.eval.gate.report import body_of, percent
from kvtape.eval.gate.workloads import own_chat
from kvtape.traces.reader import open_log
from support.command import Ran, kvtape
from support.tiny_gguf import write_tiny

QUICK = ("--turns", 1, "--chunk", 64)
SAID = ("One two three, one two three.", "And one two three, one two three?")
OWN = own_chat([("user", text) for text in SAID], 5).name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's document of proofs, which must not be that of whoever runs the tests."""
    path = tmp_path / "own" / "proofs.json"
    monkeypatch.setenv("KVTAPE_PROOFS", str(path))
    monkeypatch.setenv("KVTAPE_MODELS", str(tmp_path / "own" / "models.json"))
    return path


@pytest.fixture
def chat(tmp_path: Path) -> tuple[object, ...]:
    """A chat of two short turns, as options."""
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"role": "user", "content": text}) + "\n" for text in SAID))
    return ("--chat", path, "--decode", 5, *QUICK)


def gate(model: Path, *more: object) -> Ran:
    return kvtape("gate", "--model", model, *more)


def printed(ran: Ran) -> dict[str, Any]:
    assert ran.code in (0, 1), ran.err
    body: dict[str, Any] = json.loads(ran.out)
    return body


@pytest.mark.contract("I6")
@pytest.mark.parametrize("backend", ["llama", "openvino", "reference"])
def test_a_cell_is_measured_told_and_kept(model: Path, own: Path, chat: tuple[object, ...], backend: str) -> None:
    ran = gate(model, "--backend", backend, "--cell", "deferred-prefill", *chat, "--json")
    body = printed(ran)
    (row,) = body["rows"]
    assert row["subject"] == f"deferred-prefill@{OWN},threads=1"
    assert row["settings"].startswith("seed=0 turns=4x2 ")
    assert (row["engine"], row["decided_by"], row["machine"]) == (backend, "cpu", body["machine"])
    measures = {m["name"]: m for m in row["measures"]}
    assert measures["turns"]["value"] == 8  # four conversations of two turns
    assert measures["used"]["value"] == 8
    assert measures["used_in_smoke"]["value"] > 0
    assert measures["cpu_time_saved"]["threshold"] == body["margin"] == 0.05
    assert row["cpu"]["low"] <= row["cpu"]["saved"] <= row["cpu"]["high"]
    assert row["through"] is (row["verdict"] == "through") is ("of the turn time, at least 5 %" in row["reason"])
    assert ran.code == (
        1 if any(m["verdict"] == "fail" for n, m in measures.items() if m["ability"] == "quality") else 0
    )
    (kept,) = read_rows(own)
    assert body_of(kept) == row
    assert body["kept"] == str(own)


@pytest.mark.contract("I7")
@pytest.mark.parametrize(
    ("backend", "more", "knob"),
    [("llama", ("--flash", "on", "--uncertified"), ",k=f16,v=f16,fa=on"), ("openvino", (), ""), ("reference", (), "")],
)
def test_speculations_are_measured_told_and_kept(
    model: Path, own: Path, chat: tuple[object, ...], backend: str, more: tuple[object, ...], knob: str
) -> None:
    draft = add_artifact("itself", model, "draft")
    asked = ("--cell", "lookup", "--cell", "draft:itself,tokens=3", *chat, *more)
    lookup, itself = printed(gate(model, "--backend", backend, *asked, "--json"))["rows"]
    assert lookup["subject"] == f"lookup:ngram=3,tokens=8@{OWN},threads=1{knob}"
    assert itself["subject"] == f"draft:model=itself,tokens=3,file={draft.sha256[:12]}@{OWN},threads=1{knob}"
    for row in (lookup, itself):
        measures = {m["name"]: m for m in row["measures"]}
        assert measures["parted_turns"]["verdict"] == measures["kl"]["verdict"] == "pass"
        assert measures["used"]["value"] > 0
    # As dear as what it drafts for: it cannot pay.
    assert (itself["through"], itself["cpu"]["saved"] < 0) == (False, True)
    assert [r.subject for r in read_rows(own)] == [lookup["subject"], itself["subject"]]


@pytest.mark.contract("I7")
def test_what_cannot_be_had_here_is_a_row_too(model: Path, own: Path, chat: tuple[object, ...]) -> None:
    ran = gate(model, "--backend", "llama", "--cell", "lookup", *chat, "--json")
    (row,) = printed(ran)["rows"]
    assert (ran.code, row["verdict"], row["through"], row["measures"]) == (0, "refused", False, [])
    assert "--flash on" in row["reason"]
    assert [r.verdict for r in read_rows(own)] == ["refused"]


@pytest.mark.contract("I7")
@pytest.mark.parametrize("backend", ["llama", "reference"])
def test_a_cell_that_nobody_named_and_that_cannot_open_is_left_out(
    model: Path, own: Path, chat: tuple[object, ...], backend: str
) -> None:
    ran = gate(model, "--backend", backend, *chat, "--json")
    names = [row["subject"].partition("@")[0] for row in printed(ran)["rows"]]
    told = [line for line in ran.err.splitlines() if "is left out" in line]
    if backend == "reference":
        assert (names, told) == (["deferred-prefill", "lookup:ngram=3,tokens=8"], [])
        return
    assert (names, [r.verdict == "refused" for r in read_rows(own)]) == (["deferred-prefill"], [False])
    (line,) = told
    assert line.startswith("kvtape: lookup is left out: ")
    assert "--flash on" in line
    assert line.endswith("--cell lookup keeps the refusal as a row")


def test_rows_go_where_they_are_sent_and_sessions_and_rows_into_a_log(
    model: Path, own: Path, chat: tuple[object, ...], tmp_path: Path
) -> None:
    out, log = tmp_path / "rows.json", tmp_path / "gate.duckdb"
    asked = (*chat, "--out", out, "--log", log, "--content")
    ran = gate(model, "--backend", "llama", "--cell", "deferred-prefill", *asked)
    assert ran.code in (0, 1), ran.err
    assert not own.exists()
    rows = read_rows(out)
    assert [r.subject for r in rows] == [f"deferred-prefill@{OWN},threads=1"]
    table = ran.out.splitlines()
    assert table[1].split("\t")[:3] == ["optimisation", "workload", "engine"]
    assert len(table) == 3
    assert kvtape("verify", log).code == 0
    assert kvtape("doctor", "--contract", log).code == 0
    with open_log(log) as tape:
        told = tape.certifications()
        assert [c.certification for c in told] == list(range(sum(1 + len(r.measures) for r in rows)))
        assert {c.subject for c in told} == {r.subject for r in rows}
        assert {c.kind for c in told} == {"gate"}
        sessions = {s.session_id for s in tape.sessions(tape.default_run().run_id)}
    assert {"0-0-plain", "0-0-optimised", "0-smoke-0-plain", "0-3-optimised"} <= sessions


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--cell", "warp"), "--cell warp: choose one of"),
        (("--cell", "lookup:ngram=99"), "ngram"),
        (("--cell", "draft:nobody"), "nobody"),
        (("--cell", "lookup", "--cell", "lookup:tokens=8"), "one of them is given twice"),
        (("--workload", "chess"), "unknown workload 'chess'; choose one of chat, steps, rewrite"),
        (("--workload", "chat", "--workload", "chat"), "one of them is given twice"),
        (("--backend", "llama:way=recompute"), "leave way= out"),
        (("--content",), "nothing is stored without --log"),
        (("--chat", "no-such-file"), "no such file; give a chat file"),
        (("--backend", "gpu"), "gpu"),
        (("--turns", 0), "--turns"),
        (("--margin", 2), "--margin"),
        (("--kv-type", "q9"), "q9"),
        (("--kv-type", "bf16"), "k=bf16,v=bf16,fa=off is not certified"),
    ],
)
def test_what_cannot_be_asked_is_one_line(model: Path, own: Path, more: tuple[object, ...], said: str) -> None:
    ran = gate(model, *more)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert not own.exists()


@pytest.mark.contract("I7")
def test_record_says_where_the_gate_has_not_let_a_speculation_through(
    model: Path, own: Path, chat: tuple[object, ...], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("One two three, one two three.", encoding="utf-8")

    def said(log: str) -> str:
        asked = ("--backend", "openvino", "--text", text, "--decode", 4, "--n-ctx", 256, "--policy", "none")
        ran = kvtape("record", "--model", model, *asked, "--speculate", "lookup", "--log", tmp_path / log)
        assert ran.code == 0, ran.err
        return ran.err

    assert "whether it pays: lookup:ngram=3,tokens=8 on chat has no row of the gate" in said("a.duckdb")
    assert gate(model, "--backend", "openvino", "--cell", "lookup", *chat).code == 0
    assert "has no row of the gate" in said("other-workload.duckdb")
    (row,) = (r.model_copy(update={"subject": r.subject.replace(OWN, "chat")}) for r in read_rows(own))
    add_rows([row.model_copy(update={"verdict": "fail", "reason": "too dear", "day": "2100-01-01"})])
    assert "was not let through on 2100-01-01: too dear" in said("b.duckdb")
    add_rows([row.model_copy(update={"verdict": "pass", "day": "2100-01-02"})])
    assert "whether it pays" not in said("c.duckdb")


def test_a_precision_that_is_a_knob_stands_in_the_row(model: Path, own: Path, chat: tuple[object, ...]) -> None:
    asked = ("--kv-type", "bf16", "--uncertified", *chat, "--json")
    (row,) = printed(gate(model, "--cell", "deferred-prefill", *asked))["rows"]
    assert row["subject"] == f"deferred-prefill@{OWN},threads=1,k=bf16,v=bf16,fa=off"


def test_a_log_that_exists_is_not_touched(model: Path, own: Path, tmp_path: Path) -> None:
    log = tmp_path / "there.duckdb"
    log.write_text("mine")
    ran = gate(model, "--log", log)
    assert (ran.code, log.read_text()) == (2, "mine")


def test_shares_are_shown_as_per_cent() -> None:
    assert percent(None) == "-"
    assert percent({"saved": 0.1234, "low": None, "high": None}) == "12.3 %"
    assert percent({"saved": -0.02, "low": -0.031, "high": 0.005}) == "-2.0 % [-3.1, 0.5]"
