"""Certification on tiny models: what passes, what is refused, and a type that is planted to be bad."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import EngineFault, FatalClass, UsageError
from kvtape.backends.proofs.rows import Measure, ProofRow
from kvtape.backends.protocol import Backend, Computed, SessionConfig
from kvtape.backends.registry import open_engine
from kvtape.eval.certification.bench import attempt, kl_of_logits
from kvtape.eval.certification.catalog import Knob, chosen_knobs
from kvtape.eval.certification.certifying import Certifier, OpenEngine
from kvtape.eval.certification.quality import Predictions, compared
from kvtape.eval.certification.report import COLUMNS, rows_body, table
from kvtape.eval.certification.smoke import FULL, QUICK, Sizes, Smoke, smoke_of
from kvtape.eval.certification.thresholds import THRESHOLDS, judged, judged_today
from kvtape.eval.certification.verdicts import outcome_of
from kvtape.testing.toy import TOY_CAPABILITIES, ToyBackend
from kvtape.testing.toy_model import N_VOCAB
from support import llama_tiny, openvino_tiny

pytestmark = pytest.mark.contract("I5")

SIZES = Sizes(
    context=32,
    scored=24,
    needles=0,
    range_tokens=96,
    shift_context=256,
    shift_tokens=320,
    shift_scored=24,
    chunk=64,
)
TOKENS = [int(t) for t in np.random.default_rng(5).integers(3, 259, SIZES.text_tokens)]


def certifier(name: str, model: Path, load: OpenEngine = open_engine, **changed: Any) -> Certifier:
    smoke = Smoke(tuple(TOKENS), SIZES)
    return Certifier(name, model, load, smoke, ManualClock(), "2026-11-30", **changed)


@pytest.fixture(scope="module")
def llama() -> Certifier:
    """One for all: what the others are compared with is measured once."""
    return certifier("llama", llama_tiny.model_file("llama", n_embd=128, n_head=2, n_head_kv=1))


def one(rows: list[ProofRow]) -> ProofRow:
    assert len(rows) == 1
    return rows[0]


def knob(kv: str, flash: str) -> Knob:
    return chosen_knobs("llama", [kv], [flash])[0]


def value(row: ProofRow, ability: str, name: str) -> float | None:
    return next(m.value for m in row.measures if (m.ability, m.name) == (ability, name))


def test_the_base_against_itself_is_no_different_at_all(llama: Certifier) -> None:
    row = one(llama.certify(knob("f32", "off")))
    assert row.verdict == "pass"
    assert {row.ability(a) for a in ("quality", "capacity", "round_trip", "snapshot", "shift")} == {"pass"}
    for ability in ("quality", "shift"):
        assert value(row, ability, "kl") == 0
        assert value(row, ability, "nll_delta") == 0
        assert value(row, ability, "top1") == 1
    assert value(row, "shift", "shifts") == 16
    assert value(row, "capacity", "stored_row_bytes") == 2 * 2 * 64 * 4


def test_an_eight_bit_type_passes_and_its_row_is_the_same_when_measured_again(llama: Certifier) -> None:
    row = one(llama.certify(knob("q8_0", "on")))
    assert (row.subject, row.verdict, row.reason) == ("k=q8_0,v=q8_0,fa=on", "pass", None)
    assert value(row, "capacity", "row_bytes_delta") == 0
    assert value(row, "capacity", "stored_row_bytes") == 2 * 2 * 64 * 34 / 32
    assert value(row, "round_trip", "changed_bytes") == 0
    assert 0 < (value(row, "quality", "kl") or 0) < 0.001
    assert one(llama.certify(knob("q8_0", "on"))) == row


def test_what_the_engine_refuses_is_a_row(llama: Certifier) -> None:
    row = one(llama.certify(knob("q4_0", "off")))
    assert (row.subject, row.verdict) == ("k=q4_0,v=q4_0,fa=off", "refused")
    assert "flash attention" in (row.reason or "")
    assert [m.ability for m in row.measures] == ["open"]


def test_auto_says_what_the_engine_takes_and_the_row_of_that_decides(llama: Certifier) -> None:
    taken, auto = llama.certify(knob("f16", "auto"))
    assert (auto.subject, auto.verdict) == ("k=f16,v=f16,fa=auto", taken.verdict)
    assert taken.subject in (auto.reason or "")
    llama.known = {taken.subject: taken}.get
    try:
        assert one(llama.certify(knob("f16", "auto"))) == auto
    finally:
        llama.known = lambda subject: None


def test_keys_that_cannot_be_rotated_are_certified_without_their_shift(llama: Certifier) -> None:
    row = one(llama.certify(knob("bf16", "off")))
    assert (row.verdict, row.ability("shift")) == ("pass", "refused")
    assert "bf16" in str(next(m.reason for m in row.measures if m.ability == "shift"))


def test_openvino_types_in_one_table_with_what_it_does_not_keep() -> None:
    run = certifier("openvino", openvino_tiny.tiny_path("llama"))
    half, eight, four = (run.certify(k)[0] for k in chosen_knobs("openvino", ["f16", "u8", "u4"]))
    assert (half.verdict, eight.verdict, four.verdict) == ("pass", "pass", "refused")
    assert eight.ability("round_trip") == "pass"
    assert (value(half, "capacity", "stored_row_bytes") or 0) * 2 == 2 * 2 * 32 * 4
    assert "heap" in (four.reason or "")


class _PoorKeys(ToyBackend):
    """A toy that keeps its keys in `bits` bits, and rounds them to `shifted` with every shift: what is planted.

    Asked for f32 it is honest.
    """

    name = "llama"
    bits = shifted = 12

    def _compute(self, tokens: Sequence[int], tape: Sequence[int], cache_start: int) -> Computed:
        done = [super(_PoorKeys, self)._compute([t], [at], cache_start + i) for i, (t, at) in _pairs(tokens, tape)]
        return dataclasses.replace(done[-1], tokens=len(tokens))

    def _note(self, row: Any) -> None:
        super()._note(row)
        self._round(self.bits)

    def shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        super().shift(cache_start, cache_stop, delta)
        self._round(self.shifted)

    def _round(self, bits: int) -> None:
        if self.config.kv_type_k != "f32":
            self._memory = dataclasses.replace(self._memory, keys=tuple(_poor(k, bits) for k in self._memory.keys))


def _pairs(tokens: Sequence[int], tape: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    return enumerate(zip(tokens, tape, strict=True))


def _poor(rows: Any, bits: int) -> Any:
    """Each row on `2 ** bits` levels; rows that are on them stay."""
    scale = np.abs(rows).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 0.5)
    return np.asarray(
        (np.floor(rows / scale) + 0.5).clip(-(2 ** (bits - 1)) + 0.5, 2 ** (bits - 1) - 0.5) * scale, np.float32
    )


class _ToyEngine:
    name, version = "llama", "planted"

    def __init__(self, bits: int, shifted: int = 12) -> None:
        self._bits, self._shifted = bits, shifted
        self.facts = ToyBackend(SessionConfig()).facts

    def open(self, config: SessionConfig) -> Backend:
        backend = _PoorKeys(dataclasses.replace(config, options={}), TOY_CAPABILITIES)
        backend.bits, backend.shifted = self._bits, self._shifted
        return backend

    def tokenize(self, text: str) -> list[int]:
        raise NotImplementedError

    detokenize = tokenize

    def close(self) -> None:
        pass


def planted(bits: int, shifted: int = 12) -> ProofRow:
    """The row of a knob that keeps keys in so many bits, on tokens of the toy."""
    smoke = Smoke(tuple(t % N_VOCAB for t in TOKENS), SIZES)
    run = Certifier(
        "llama", Path("toy"), lambda n, m, o, /: _ToyEngine(bits, shifted), smoke, ManualClock(), "2026-11-30"
    )
    return one(run.certify(Knob("llama", "q4_0", "q4_0", "off")))


def test_a_type_that_is_planted_to_be_bad_fails_its_quality_and_a_fine_one_passes() -> None:
    poor, fine = planted(2), planted(12)
    assert (poor.ability("quality"), poor.verdict) == ("fail", "fail")
    assert "quality" in (poor.reason or "")
    assert fine.ability("quality") == "pass"
    assert (value(poor, "quality", "kl") or 0) > 10 * (value(fine, "quality", "kl") or 0)
    assert fine.ability("round_trip") == "pass"


def test_keys_that_round_at_every_shift_fail_their_shift_and_keep_their_quality() -> None:
    row = planted(12, shifted=2)
    assert (row.ability("quality"), row.ability("shift")) == ("pass", "fail")


def test_a_refusal_and_a_death_are_measures() -> None:
    def refuse() -> list[Measure]:
        raise UsageError("not\nhere")

    def die() -> list[Measure]:
        raise EngineFault(FatalClass.DEVICE_LOST, "signal 6")

    assert [(m.verdict, m.reason) for m in attempt("shift", "kl", refuse)] == [("refused", "not here")]
    assert [(m.verdict, m.reason) for m in attempt("shift", "kl", die)] == [("fail", "device_lost: signal 6")]


def test_an_engine_that_dies_when_it_opens_a_type_is_refused_and_the_next_type_goes_on() -> None:
    class Dying(_ToyEngine):
        def open(self, config: SessionConfig) -> Backend:
            if config.kv_type_k == "iq4_nl":
                raise EngineFault(FatalClass.DEVICE_LOST, "the process ended by signal 6")
            return super().open(config)

    smoke = Smoke(tuple(t % N_VOCAB for t in TOKENS), SIZES)
    run = Certifier("llama", Path("toy"), lambda n, m, o, /: Dying(12), smoke, ManualClock(), "2026-11-30")
    row = one(run.certify(Knob("llama", "iq4_nl", "iq4_nl", "on")))
    assert (row.verdict, row.reason) == ("refused", "device_lost: the process ended by signal 6")
    assert one(run.certify(Knob("llama", "q4_0", "q4_0", "off"))).ability("quality") == "pass"


def test_the_comparison_by_hand() -> None:
    best = Predictions(np.log(np.array([[0.5, 0.5], [0.9, 0.1]], np.float32)), np.array([0.1, 0.2]))
    other = Predictions(np.log(np.array([[0.25, 0.75], [0.9, 0.1]], np.float32)), np.array([0.3, 0.2]))
    delta, kl, top1 = compared(best, other)
    assert delta == pytest.approx(0.1)
    assert kl == pytest.approx((0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75)) / 2, abs=1e-6)
    assert top1 == 0.5


def test_logits_that_are_no_numbers_pass_nothing() -> None:
    fine, broken = np.zeros(4, np.float32), np.array([0, np.nan, 0, 0], np.float32)
    assert kl_of_logits(fine, fine) == 0
    assert judged("snapshot", "kl", kl_of_logits(fine, broken)).verdict == "fail"


def test_every_threshold_names_its_source_and_is_alone() -> None:
    assert all(t.source for t in THRESHOLDS)
    assert len({(t.ability, t.name) for t in THRESHOLDS}) == len(THRESHOLDS)
    with pytest.raises(KeyError, match="no threshold"):
        judged("quality", "cosine", 1.0)


def test_a_number_is_judged_anew_by_the_table_of_today() -> None:
    old = Measure(ability="shift", name="top1", value=0.5, unit="share", verdict="pass", reason="said once")
    anew = judged_today(old)
    assert (anew.verdict, anew.threshold, anew.bound, anew.reason) == ("fail", 0.9, "least", "said once")
    assert judged_today(anew) == anew
    told = Measure(ability="quality", name="nll", value=3.0, unit="nats/token", verdict="pass")
    refused = Measure(ability="shift", name="kl", verdict="refused", reason="no")
    assert (judged_today(told), judged_today(refused)) == (told, refused)


def test_what_was_not_measured_is_no_pass() -> None:
    opened = Measure(ability="open", name="opens", verdict="pass")
    with pytest.raises(ValueError, match="not measured: quality, capacity"):
        outcome_of([opened])
    refused = [opened, *(Measure(ability=a, name="x", verdict="refused", reason="no") for a in ("quality", "capacity"))]
    assert outcome_of(refused).verdict == "fail"


def test_texts_that_are_too_short_and_models_that_are_too_small_are_refused() -> None:
    assert smoke_of(TOKENS, SIZES, 512).settings == smoke_of(TOKENS, SIZES, 512).settings
    assert smoke_of(TOKENS, SIZES, 512).settings != smoke_of(TOKENS[::-1], SIZES, 512).settings
    with pytest.raises(UsageError, match="longer --text"):
        smoke_of(TOKENS[:100], SIZES, 512)
    with pytest.raises(UsageError, match="trained on 128"):
        smoke_of(TOKENS, SIZES, 128)
    assert QUICK.text_tokens < FULL.text_tokens


@pytest.mark.parametrize("sizes", [FULL, QUICK, SIZES], ids=["full", "quick", "here"])
def test_the_range_that_goes_and_comes_back_lies_before_the_last_token(sizes: Sizes) -> None:
    assert sizes.range_tokens // 2 // 32 * 32 + 32 < sizes.range_tokens


def test_the_report_has_a_cell_for_every_column_and_every_field(llama: Certifier) -> None:
    rows = [one(llama.certify(knob(kv, flash))) for kv, flash in (("f16", "off"), ("q4_0", "off"))]
    title, columns, cells = table(rows)
    assert columns == COLUMNS
    assert title
    assert all(len(line) == len(COLUMNS) for line in cells)
    assert [body["abilities"]["open"] for body in rows_body(rows)] == ["pass", "refused"]
