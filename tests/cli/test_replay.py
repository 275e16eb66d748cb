"""`kvtape replay` on a tiny model: what it reports, and what it refuses. Planted engine faults are in tests/replay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtape.traces.reader import open_log
from support.command import Ran, kvtape
from support.forge import edit_log
from support.recorded import record
from support.tiny_gguf import write_tiny

BACKEND_KEYS = {
    "name",
    "way",
    "events_compared",
    "witness_positions",
    "witness_identities",
    "max_kl",
    "mean_kl",
    "top1",
    "not_executed",
    "checkpoints",
    "residency_events",
}


def replay(log: Path, model: Path, *on: str) -> Ran:
    return kvtape("replay", log, "--model", model, "--json", *(part for spec in on for part in ("--on", spec)))


def test_both_engines_and_the_other_way_are_equal(log: Path, model: Path) -> None:
    ran = replay(log, model, "llama", "openvino", "openvino:way=recompute")
    assert ran.code == 0, ran.err
    body = json.loads(ran.out)
    assert body["equal"] is True
    assert body["first_divergence"] is None
    assert [b["name"] for b in body["backends"]] == ["llama", "openvino", "openvino:way=recompute"]
    for backend in body["backends"]:
        assert set(backend) >= BACKEND_KEYS
        assert backend["witness_positions"] == backend["residency_events"] > 0
        assert backend["witness_identities"] > 0
        assert backend["checkpoints"] >= 20
        assert backend["max_kl"] < 1e-6


def test_the_same_replay_prints_the_same_bytes(log: Path, model: Path) -> None:
    assert replay(log, model, "llama").out == replay(log, model, "llama").out


def test_people_get_the_equality_table(log: Path, model: Path) -> None:
    out = kvtape("replay", log, "--model", model, "--on", "llama").out
    assert "EQUAL: the same tokens are resident everywhere" in out
    assert "\tllama\nway\tnative\nevents compared\t" in out


def test_a_forged_range_is_named_by_its_event(log: Path, model: Path, tmp_path: Path) -> None:
    """The chain is whole again after the forgery, so `verify` is content; the replay is not."""
    with open_log(log) as tape:
        evict = next(e for e in tape.events(tape.default_run().run_id, "main") if e.op == "evict")
    change = "UPDATE events SET stop = stop - 1, n_tokens = n_tokens - 1, blocks = NULL, cold = false WHERE seq = "
    forged = edit_log(log, tmp_path / "forged.duckdb", [f"{change}{evict.seq}"], True)
    assert kvtape("verify", forged).code == 0
    ran = replay(forged, model, "llama")
    assert ran.code == 1
    first = json.loads(ran.out)["first_divergence"]
    assert (first["session"], first["seq"]) == ("main", evict.seq)
    plain = kvtape("replay", forged, "--model", model, "--on", "llama")
    assert plain.code == 1
    assert "NOT EQUAL" in plain.out
    assert "first divergence" in plain.out


def test_the_wrong_model_is_named_with_what_differs(log: Path, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other.gguf", arch="qwen2")
    ran = replay(log, other, "llama")
    assert ran.code == 2
    assert "architecture" in ran.err


def test_without_the_model_the_remedy_is_named(log: Path) -> None:
    ran = kvtape("replay", log, "--on", "llama")
    assert ran.code == 2
    assert "--model" in ran.err
    assert "tiny.gguf" in ran.err


@pytest.mark.parametrize(
    ("spec", "code", "words"),
    [
        ("reference:engine=apollo", 2, "carries no session"),
        ("lama", 2, "llama"),
        ("llama:way=sideways", 2, "native, recompute"),
        ("llama:nonsense=1", 2, "known"),
        ("llama:", 2, "colon"),
    ],
)
def test_a_target_that_cannot_be(log: Path, model: Path, spec: str, code: int, words: str) -> None:
    ran = replay(log, model, spec)
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.count("\n") == 1
    assert words in ran.err


def test_an_engine_that_is_none_is_named_before_a_model_is_asked_for(log: Path) -> None:
    ran = kvtape("replay", log, "--on", "lama")
    assert (ran.code, "unknown backend 'lama'" in ran.err) == (2, True)


def test_a_log_without_content_is_replayed_with_surrogates_and_says_so(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "a.duckdb"
    assert record(model, log).code == 0
    ran = replay(log, model, "llama")
    assert ran.code == 0, ran.err
    body = json.loads(ran.out)
    assert body["equal"]
    assert body["backends"][0]["mean_kl"] is None
    assert "surrogate tokens" in body["notes"][0]
    table = kvtape("replay", log, "--model", model, "--on", "llama").out
    assert "rows identified by their token" in table
    assert "mean KL to the reference" not in table
