"""`kvtape record --speculate` and `kvtape models`: the same is said, and drafts are explicit files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvtape.backends.speculation.artifacts import MODELS_VARIABLE
from kvtape.replay.identities import check_identities
from kvtape.traces.reader import open_log
from support import llama_tiny
from support.command import Ran, kvtape
from support.openvino_ir import tiny_ir

pytestmark = pytest.mark.contract("I7")

TEXT = "The keys and the values. The keys and the values. The keys and the queries. " * 4


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "models.json"
    monkeypatch.setenv(MODELS_VARIABLE, str(path))
    return path


def record(log: Path, text: Path, backend: str, model: Path, *more: object) -> Ran:
    flash = ["--flash", "on", "--uncertified"] if backend == "llama" else []
    sizes = ["--n-ctx", 256, "--chunk", 64, "--decode", 40, "--policy", "stream:sink=4,recent=100", "--content"]
    return kvtape(
        "record", "--model", model, "--backend", backend, "--text", text, "--log", log, *sizes, *flash, "--json", *more
    )


def told(ran: Ran) -> dict[str, Any]:
    assert ran.code == 0, ran.err
    body: dict[str, Any] = json.loads(ran.out)
    return body


@pytest.mark.parametrize("backend", ["llama", "openvino", "reference"])
def test_the_same_is_said_and_the_log_is_carried_out_again(backend: str, text: Path, tmp_path: Path) -> None:
    model = llama_tiny.model_file(weights="q8_0")
    plain = told(record(tmp_path / "plain.duckdb", text, backend, model))
    log = tmp_path / "drafted.duckdb"
    drafted = told(record(log, text, backend, model, "--speculate", "lookup:tokens=6"))
    for name in ("said", "tape_tokens", "resident_tokens", "evicted_tokens", "events"):
        assert drafted[name] == plain[name], name
    assert drafted["drafted_tokens"] >= drafted["accepted_tokens"] > 0
    assert "drafted_tokens" not in plain
    assert drafted["run_id"] != plain["run_id"]
    assert kvtape("verify", log).code == 0
    ran = told(kvtape("replay", log, "--on", backend, "--on", "reference", "--model", model, "--json"))
    assert ran["equal"]
    with open_log(log) as opened:
        checks = {c.name: c for c in check_identities(lambda q: opened.sql(q)[1])}
        assert checks["drafts"].rows > 0
        assert all(not c.broken for c in checks.values())
        shares = opened.sql("SELECT drafted_tokens, accepted_tokens FROM turns WHERE drafted_tokens IS NOT NULL")[1]
        assert shares == [(drafted["drafted_tokens"], drafted["accepted_tokens"])]
        events = opened.events(drafted["run_id"], "main")
        assert '"speculation": "lookup:ngram=3,tokens=6"' in (events[0].detail or "")
        assert all(e.drafted_tokens is None or e.op == "decode" for e in events)


def test_a_what_if_of_it_decodes_plainly(text: Path, tmp_path: Path) -> None:
    model = llama_tiny.model_file()
    log, costs = tmp_path / "drafted.duckdb", tmp_path / "costs.json"
    told(record(log, text, "reference", model, "--speculate", "lookup"))
    told(record(tmp_path / "plain.duckdb", text, "reference", model))
    ran = kvtape("calibrate", tmp_path / "plain.duckdb", "--out", costs)
    assert ran.code == 0, ran.err
    ran = kvtape("simulate", log, "--policy", "stream:sink=4,recent=60", "--costs", costs, "--json")
    assert ran.code == 0, ran.err
    ran = kvtape("calibrate", log, "--out", tmp_path / "of_drafts.json")
    assert ran.code == 0, ran.err


def test_a_draft_model_is_a_named_file_that_stays_what_it_was(text: Path, tmp_path: Path, own_models: Path) -> None:
    model, draft = llama_tiny.model_file(), tmp_path / "draft.gguf"
    draft.write_bytes(llama_tiny.model_file(seed=3).read_bytes())
    log = tmp_path / "a.duckdb"
    ran = record(log, text, "reference", model, "--speculate", "draft:model=small")
    assert (ran.code, log.exists()) == (2, False)
    assert "no model 'small'" in ran.err
    assert "kvtape models add" in ran.err
    added = told(kvtape("models", "add", "small", draft, "--json"))["models"]
    assert [m["role"] for m in added] == ["draft"]
    assert told(kvtape("models", "list", "--json"))["models"] == [{k: v for k, v in added[0].items() if k != "state"}]
    ran = kvtape("models", "add", "small", draft)
    assert (ran.code, "is there already" in ran.err) == (2, True)
    assert kvtape("models", "verify").code == 0
    plain = told(record(tmp_path / "plain.duckdb", text, "reference", model))
    drafted = told(record(log, text, "reference", model, "--speculate", "draft:model=small,tokens=3"))
    assert drafted["said"] == plain["said"]
    assert drafted["drafted_tokens"] > 0
    draft.write_bytes(draft.read_bytes()[:-1] + b"\x01")
    assert [m["state"] for m in json.loads(kvtape("models", "verify", "--json").out)["models"]] == ["changed"]
    ran = record(tmp_path / "b.duckdb", text, "reference", model, "--speculate", "draft:model=small")
    assert (ran.code, (tmp_path / "b.duckdb").exists()) == (2, False)
    assert "is not the file that was added" in ran.err
    draft.unlink()
    assert kvtape("models", "verify").code == 1
    assert f"# removed from {own_models}\n" in kvtape("models", "remove", "small").out
    assert told(kvtape("models", "list", "--json"))["models"] == []
    assert kvtape("models", "remove", "small").code == 2


REFUSED = {
    "no spec": ("guess", "unknown speculation 'guess'; allowed: draft, lookup"),
    "no option": ("lookup:length=3", "unknown option of lookup 'length'"),
    "too long": ("lookup:tokens=32", "tokens=32"),
    "no model": ("draft", "draft needs model="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_specs_are_refused_before_anything_is_loaded(name: str, text: Path, tmp_path: Path) -> None:
    spec, why = REFUSED[name]
    ran = record(tmp_path / "a.duckdb", text, "reference", llama_tiny.model_file(), "--speculate", spec)
    assert (ran.code, (tmp_path / "a.duckdb").exists()) == (2, False)
    assert why in ran.err


def test_where_drafts_cannot_be_looked_at_the_reason_is_given(text: Path, tmp_path: Path) -> None:
    model = llama_tiny.model_file()
    log = tmp_path / "a.duckdb"
    sizes = [
        "--n-ctx",
        256,
        "--policy",
        "none",
        "--log",
        log,
        "--text",
        text,
        "--model",
        model,
        "--speculate",
        "lookup",
    ]
    for backend, why in (("llama", "open with --flash on"), ("reference:scores=on", "scores=on counts what")):
        ran = kvtape("record", "--backend", backend, *sizes)
        assert (ran.code, log.exists()) == (2, False)
        assert why in ran.err


def test_a_draft_model_of_another_vocabulary_is_refused(text: Path, tmp_path: Path) -> None:
    other = llama_tiny.model_file(n_merges=20)
    assert kvtape("models", "add", "other", other, "--role", "draft").code == 0
    assert kvtape("models", "add", "big", other, "--role", "target").code == 0
    log = tmp_path / "a.duckdb"
    for name, why in (("other", "its vocabulary is not that of"), ("big", "was added as a target model")):
        ran = record(log, text, "reference", llama_tiny.model_file(), "--speculate", f"draft:model={name}")
        assert (ran.code, log.exists()) == (2, False), ran.err
        assert why in ran.err


def test_a_draft_model_that_does_not_open_leaves_no_log(text: Path, tmp_path: Path, own_models: Path) -> None:
    unsaid, log = tmp_path / "unsaid", tmp_path / "a.duckdb"
    shutil.copytree(tiny_ir(), unsaid)
    (unsaid / "config.json").unlink()
    ran = kvtape("models", "add", "unsaid", unsaid, "--role", "draft")
    assert (ran.code, ran.out, own_models.exists()) == (2, "", False)
    (line,) = ran.err.strip().splitlines()
    assert f"{unsaid}: the folder does not say for how many tokens" in line
    assert "put its config.json (max_position_embeddings) there, then add it" in line
    # As a target it may be listed, since openvino:trained=N says it; only another hand calls it a draft.
    assert kvtape("models", "add", "unsaid", unsaid, "--role", "target").code == 0
    own_models.write_text(own_models.read_text(encoding="utf-8").replace('"target"', '"draft"'), encoding="utf-8")
    ran = record(log, text, "openvino", tiny_ir(), "--speculate", "draft:model=unsaid")
    assert (ran.code, log.exists()) == (2, False)
    assert len(ran.err.strip().splitlines()) == 1
    assert f"{unsaid}: the folder does not say for how many tokens" in ran.err


def test_a_damaged_list_is_named_and_stays(own_models: Path) -> None:
    own_models.write_text('{"schema": "kvtape.models/1"', encoding="utf-8")
    for verb in (("list",), ("verify",), ("remove", "a"), ("add", "a", llama_tiny.model_file())):
        ran = kvtape("models", *verb)
        assert ran.code == 2
        assert str(own_models) in ran.err
    assert own_models.read_text(encoding="utf-8") == '{"schema": "kvtape.models/1"'
