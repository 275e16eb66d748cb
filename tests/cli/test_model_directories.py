"""`--model DIR`: recorded on an OpenVINO model directory; carried out again there, on the reference, on its GGUF."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from support.command import Ran, kvtape
from support.openvino_ir import tiny_ir, tiny_ir_source

KIND = ("llama-two-kv-heads", "q8_0")
TEXT = "the cache holds the keys and the values of the tokens that the model has seen\n" * 12


def record(log: Path, model: Path, text: str, *more: str, backend: str = "openvino") -> Ran:
    source = log.with_suffix(".txt")
    source.write_text(text)
    policy = "stream:sink=4,recent=124"
    return kvtape(
        "record", "--model", model, "--backend", backend, "--policy", policy, "--n-ctx", 256, "--text", source,
        "--decode", 8, "--log", log, "--json", *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("directories") / "ir.duckdb"
    ran = record(path, tiny_ir(*KIND), TEXT, "--content")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["evicted_tokens"] > 0
    return path


def replay(log: Path, model: Path, *on: str) -> Ran:
    return kvtape("replay", log, "--model", model, "--json", *(part for spec in on for part in ("--on", spec)))


def test_a_log_of_a_directory_is_equal_on_openvino_both_ways_and_on_the_reference(log: Path) -> None:
    ran = replay(log, tiny_ir(*KIND), "openvino", "openvino:way=recompute", "reference")
    assert ran.code == 0, ran.err
    body = json.loads(ran.out)
    assert body["equal"] is True
    assert body["model_fingerprint"].startswith("openvino:")
    assert body["notes"] == []
    for backend in body["backends"]:
        assert backend["witness_positions"] == backend["residency_events"] > 0
        assert backend["witness_identities"] == backend["witness_rows"] > 0
        assert backend["checkpoints"] >= 20
        assert backend["max_kl"] < 1e-9


def test_on_the_gguf_that_it_was_made_from_it_is_equal_and_what_is_not_known_is_said(log: Path) -> None:
    ran = replay(log, tiny_ir_source(*KIND), "llama")
    assert ran.code == 0, ran.err
    body = json.loads(ran.out)
    assert body["equal"] is True
    (note,) = body["notes"]
    assert "another file, in another format; that it holds the same weights is your word" in note
    assert body["backends"][0]["witness_identities"] == body["backends"][0]["witness_rows"] > 0


def test_another_directory_is_another_model(log: Path) -> None:
    ran = replay(log, tiny_ir("qwen2", "q8_0"), "openvino")
    assert ran.code == 2
    assert "was recorded with another model" in ran.err


def test_a_log_without_content_is_replayed_with_surrogates(tmp_path: Path) -> None:
    path = tmp_path / "bare.duckdb"
    assert record(path, tiny_ir(*KIND), TEXT[:400]).code == 0
    ran = replay(path, tiny_ir(*KIND), "openvino")
    assert ran.code == 0, ran.err
    assert "surrogate" in json.loads(ran.out)["notes"][0]


def test_what_is_wrong_with_a_directory_is_said_before_a_log_exists(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_ir(*KIND), tmp_path / "ir"))
    (folder / "openvino_model.bin").unlink()
    log = tmp_path / "no.duckdb"
    for model, backend, why in (
        (folder, "openvino", "the weights are missing; copy the whole folder"),
        (tiny_ir(*KIND), "llama", "llama does not read the folder of an OpenVINO model; give --model the GGUF"),
        (tmp_path, "openvino", "no openvino_model.xml in this folder"),
    ):
        ran = record(log, model, "the cache", backend=backend)
        assert ran.code == 2
        assert why in ran.err
        assert "Traceback" not in ran.err
        assert not log.exists()


def test_a_directory_that_does_not_say_its_context_is_told_it_by_the_backends_option(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_ir(*KIND), tmp_path / "ir"))
    (folder / "config.json").unlink()
    ran = record(tmp_path / "no.duckdb", folder, "the cache")
    assert ran.code == 2
    assert "openvino:trained=N" in ran.err
    asked = ["--model", folder, "--backend", "openvino:trained=4096,memory=1GiB", "--text", tmp_path / "no.txt"]
    ran = kvtape("record", *asked, "--policy", "none", "--log", tmp_path / "no.duckdb")
    assert ran.code == 2
    assert "give --n-ctx" in ran.err
    log = tmp_path / "yes.duckdb"
    assert record(log, folder, TEXT[:400], "--content", backend="openvino:trained=4096").code == 0
    assert json.loads(replay(log, folder, "openvino:trained=4096").out)["equal"] is True
