"""What rows of the gate let through: this cell, model, engine version and class of machine, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtape.backends.proofs.gates import gate_problem, gate_row, gate_subject
from kvtape.backends.proofs.machine import machine_class, speed_class
from kvtape.backends.proofs.rows import ProofRow
from kvtape.backends.proofs.store import Proofs
from kvtape.backends.protocol import ModelFacts, SessionConfig

FACTS = ModelFacts("m.gguf", "blake2b:1", "llama", 64, 2048, frozenset())
CONFIG = SessionConfig(threads=1)
ASKED = {
    "optimisation": "deferred-prefill",
    "engine": "llama",
    "engine_version": "b1",
    "facts": FACTS,
    "config": CONFIG,
}


def row(**other: Any) -> ProofRow:
    is_ = {
        "kind": "gate",
        "model": "m.gguf",
        "fingerprint": FACTS.fingerprint,
        "engine": "llama",
        "engine_version": "b1",
        "machine": speed_class(),
        "day": "2026-11-30",
        "subject": gate_subject("deferred-prefill", "chat", "llama", CONFIG),
        "verdict": "pass",
    }
    return ProofRow(**(is_ | other))


def problem(*rows: ProofRow, **other: Any) -> str | None:
    return gate_problem(**(ASKED | other), proofs=Proofs(rows))


def test_a_passing_row_lets_its_cell_through() -> None:
    assert gate_subject("deferred-prefill", "chat", "llama", CONFIG) == "deferred-prefill@chat,threads=1"
    assert problem(row()) is None


def test_without_a_row_the_command_that_makes_one_is_named() -> None:
    told = problem()
    assert told is not None
    assert told.endswith("ask it with: kvtape gate --model m.gguf --backend llama --cell deferred-prefill")
    assert (problem(config=replace(CONFIG, threads=4)) or "").endswith("--cell deferred-prefill --threads 4")


def test_the_command_names_what_the_row_would_be_found_by() -> None:
    packed = replace(CONFIG, kv_type_k="q8_0", flash_attention="on")
    told = problem(config=packed, optimisation="draft:model=small,tokens=4,file=0123456789ab") or ""
    assert told.endswith("--cell draft:model=small,tokens=4 --kv-type q8_0/f16 --flash on")
    wide = replace(CONFIG, kv_type_k="u8", kv_type_v="u8", options={"inference": "bf16"})
    told = problem(config=wide, engine="openvino") or ""
    assert told.endswith("--backend openvino:inference=bf16 --cell deferred-prefill --kv-type u8")


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": "blake2b:2"},
        {"engine": "openvino"},
        {"engine_version": "b2"},
        {"machine": "x86_64+other/2-core"},
        {"machine": machine_class()},
        {"kind": "certification"},
        {"subject": "lookup@chat,threads=1"},
        {"subject": "deferred-prefill@steps,threads=1"},
        {"subject": "deferred-prefill@chat,threads=2"},
        {"subject": "deferred-prefill@chat,threads=1,k=q8_0,v=q8_0,fa=on"},
    ],
)
def test_a_row_of_anything_else_lets_nothing_through(other: dict[str, str]) -> None:
    assert "has no row of the gate" in (problem(row(**other)) or "")


@pytest.mark.parametrize(
    "other",
    [
        {"config": replace(CONFIG, threads=2)},
        {"config": replace(CONFIG, kv_type_k="q8_0", kv_type_v="q8_0", flash_attention="on")},
        {"workload": "steps"},
        {"facts": replace(FACTS, fingerprint="blake2b:2")},
        {"engine_version": "b2"},
        {"optimisation": "lookup"},
    ],
)
def test_a_session_that_is_other_than_the_row_is_not_let_through(other: dict[str, Any]) -> None:
    assert "has no row of the gate" in (problem(row(), **other) or "")


def test_the_newest_row_counts_and_says_why_not() -> None:
    failed = row(verdict="fail", reason="saves 1.0 %", day="2026-12-01")
    assert problem(row(), failed) == "deferred-prefill on chat was not let through on 2026-12-01: saves 1.0 %"
    assert problem(failed, row(day="2026-12-02")) is None
    # Of one day: the one that was written last.
    assert problem(failed, row(day="2026-12-01")) is None
    assert gate_row(**ASKED, proofs=Proofs((row(), failed))) == failed
