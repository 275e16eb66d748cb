"""What needs a proof, and what a row lets through."""

from __future__ import annotations

from typing import Any

import pytest

from kvtape.backends.errors import UsageError
from kvtape.backends.proofs.check import precision_of, precision_problem
from kvtape.backends.proofs.knobs import certify_command, knob_text, precision_subject
from kvtape.backends.proofs.machine import machine_class
from kvtape.backends.proofs.rows import Ability, Measure, ProofRow, Verdict
from kvtape.backends.proofs.store import Proofs
from kvtape.backends.protocol import ModelFacts, SessionConfig
from kvtape.eval.certification.catalog import BASES, catalog, chosen_knobs, parse_kv_type

pytestmark = pytest.mark.contract("I5")

FACTS = ModelFacts("/models/m.gguf", "llama/1", "llama", 300, 512, frozenset())
Q8 = SessionConfig(kv_type_k="q8_0", kv_type_v="q8_0", flash_attention="on")


def config(k: str, v: str, flash: Any = "off", **options: str) -> SessionConfig:
    return SessionConfig(kv_type_k=k, kv_type_v=v, flash_attention=flash, options=options)


@pytest.mark.parametrize(
    ("engine", "asked", "subject"),
    [
        ("llama", config("f16", "f16"), None),
        ("llama", config("f32", "f16"), None),
        ("llama", config("f16", "f16", "on"), "k=f16,v=f16,fa=on"),
        ("llama", config("f16", "f16", "auto"), "k=f16,v=f16,fa=auto"),
        ("llama", config("bf16", "bf16"), "k=bf16,v=bf16,fa=off"),
        ("llama", config("q8_0", "f16"), "k=q8_0,v=f16,fa=off"),
        ("openvino", config("f32", "f32", inference="f32"), None),
        ("openvino", config("f16", "f16"), "k=f16,v=f16"),
        ("openvino", config("u8", "u8", inference="bf16"), "k=u8,v=u8,inference=bf16"),
        ("openvino", config("f32", "f32", inference="bf16"), "k=f32,v=f32,inference=bf16"),
        ("reference", config("f32", "f32"), None),
        ("modelled", config("q8_0", "q8_0", "on"), None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_a_knob(engine: str, asked: SessionConfig, subject: str | None) -> None:
    assert precision_subject(engine, asked) == subject


def proof(*measures: Measure, verdict: Verdict = "pass", day: str = "2026-11-30", **changed: Any) -> ProofRow:
    facts: dict[str, Any] = {
        "kind": "certification",
        "model": "m.gguf",
        "fingerprint": "llama/1",
        "engine": "llama",
        "engine_version": "1",
        "machine": machine_class(),
        "subject": "k=q8_0,v=q8_0,fa=on",
    }
    return ProofRow(**(facts | {"day": day, "verdict": verdict, "measures": measures} | changed))


def measured(ability: Ability, verdict: Verdict = "pass", reason: str | None = None) -> Measure:
    return Measure(ability=ability, name="x", verdict=verdict, reason=reason)


ALL = tuple(measured(a) for a in ("open", "quality", "capacity", "round_trip", "snapshot", "shift"))


def problem(*rows: ProofRow, asked: SessionConfig = Q8) -> str | None:
    return precision_problem("llama", "1", FACTS, asked, Proofs(rows))


def test_a_knob_without_a_row_names_the_command() -> None:
    told = problem()
    assert told is not None
    assert "kvtape certify --model /models/m.gguf --backend llama --kv-type q8_0 --flash on" in told
    assert "--uncertified" in told


def test_a_passing_row_of_exactly_this_lets_it_through_and_no_other() -> None:
    assert problem(proof(*ALL)) is None
    for key in ("fingerprint", "engine", "engine_version", "machine", "subject"):
        assert problem(proof(*ALL, **{key: "another"})) is not None
    assert problem(proof(*ALL, kind="gate")) is not None


def test_the_newest_row_counts_whatever_an_older_one_said() -> None:
    failed = proof(measured("quality", "fail"), verdict="fail", reason="KL 0.3", day="2026-12-01")
    told = problem(failed, proof(*ALL))
    assert told is not None
    assert "2026-12-01" in told
    assert "KL 0.3" in told
    assert problem(proof(*ALL, day="2026-12-02"), failed) is None


def test_a_base_precision_needs_no_row() -> None:
    assert problem(asked=config("f32", "f32")) is None


@pytest.mark.parametrize(
    ("ability", "flag"),
    [("shift", "position_shift"), ("round_trip", "cold_store"), ("snapshot", "snapshot_state")],
)
@pytest.mark.parametrize("verdict", ["fail", "refused", None])
def test_an_ability_that_did_not_pass_is_withheld_and_nothing_else(
    ability: Ability, flag: str, verdict: Verdict | None
) -> None:
    measures = [m for m in ALL if m.ability != ability]
    if verdict is not None:
        measures.append(measured(ability, verdict, "it drifted"))
    known = precision_of("llama", "1", FACTS, Q8, Proofs((proof(*measures),)))
    assert known.certified
    assert list(known.withheld) == [flag]
    assert ("it drifted" if verdict else "not measured") in known.withheld[flag]


def test_nothing_is_withheld_from_what_passed_nor_from_what_is_opened_uncertified() -> None:
    assert precision_of("llama", "1", FACTS, Q8, Proofs((proof(*ALL),))).withheld == {}
    assert not precision_of("llama", "1", FACTS, Q8, Proofs()).certified


def test_commands_and_texts() -> None:
    mixed = config("u8", "f32", inference="bf16")
    assert knob_text("openvino", mixed) == "k=u8,v=f32,inference=bf16"
    command = "kvtape certify --model /models/m.gguf --backend openvino:inference=bf16 --kv-type u8/f32"
    assert certify_command("openvino", FACTS, mixed) == command


def test_the_catalog_has_every_type_and_begins_with_the_base() -> None:
    for engine, base in BASES.items():
        assert catalog(engine)[0] == base
    llama = {(k.k, k.v) for k in catalog("llama")}
    assert {(t, t) for t in ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")} <= llama
    assert {("q8_0", "f16"), ("f16", "q8_0"), ("q8_0", "q4_0"), ("f16", "bf16")} <= llama
    assert {k.flash for k in catalog("llama")} == {"off", "on", "auto"}
    assert {"f32", "f16", "bf16", "u8", "u4"} <= {k.k for k in catalog("openvino")}


def test_knobs_are_chosen_by_type_and_flash() -> None:
    assert [k.asked for k in chosen_knobs("llama", ["q8_0/f16"], ["on"])] == ["k=q8_0,v=f16,fa=on"]
    assert [k.asked for k in chosen_knobs("llama", ["q8_0"], ["auto", "off"])] == [
        "k=q8_0,v=q8_0,fa=off",
        "k=q8_0,v=q8_0,fa=auto",
    ]
    assert [k.asked for k in chosen_knobs("openvino", ["bf16", "u8"])] == [
        "k=bf16,v=bf16,inference=bf16",
        "k=u8,v=u8",
    ]
    assert {dict(k.options)["inference"] for k in chosen_knobs("openvino", [], [], "bf16")} == {"bf16"}
    assert {k.flash for k in chosen_knobs("llama", [], ["off"])} == {"off"}


@pytest.mark.parametrize(
    ("engine", "types", "flash", "said"),
    [
        ("reference", [], [], "no precision knob"),
        ("llama", ["q8_0/"], [], "write a type"),
        ("llama", ["a/b/c"], [], "write a type"),
        ("llama", ["q80"], [], r"no storage type of llama, did you mean 'q8_0'\? choose from f32, f16"),
        ("llama", ["q8_0/u8"], [], "u8: no storage type of llama"),
        ("openvino", ["q8_0"], [], "no storage type of openvino; choose from f32, f16, u8"),
        ("llama", [], ["maybe"], "choose off, on, auto"),
        ("openvino", [], ["on"], "no flash attention"),
    ],
)
def test_what_cannot_be_chosen_is_refused(engine: str, types: list[str], flash: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        chosen_knobs(engine, types, flash)


def test_types_as_text() -> None:
    assert parse_kv_type("f16") == ("f16", "f16")
    assert parse_kv_type("q8_0/q4_0") == ("q8_0", "q4_0")
