"""A text on which rounding alone moves the logits: numbers are held beside that, and faults are still caught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtape.backends.protocol import Computed, Logits
from kvtape.backends.registry import open_engine
from kvtape.capacity.model import read_model
from kvtape.cli.models import demo_model
from kvtape.planner.events import Way
from kvtape.replay.findings import Gate
from kvtape.replay.numbers import Agreement
from kvtape.replay.replayer import OpenEngine, replay
from kvtape.replay.report import ReplayReport
from support.faulty import FAULTS, Faultless, LyingBackend, opens_with
from support.llama_tiny import model_file
from support.script_log import ScriptLog
from support.scripted import Script

STRICT = Gate(mean_kl=1e-9)
"""A limit that no quantised model keeps: as if the text were one that rounding moves far."""


@pytest.fixture(scope="module")
def packed() -> Path:
    return model_file("llama", n_head=4, n_head_kv=2, head_dim=32, weights="q4_0")


def session(first: Sequence[int], *, repeated: int = 36) -> Script:
    """Two tokens in turns behind the first: one evict keeps positions, one closes its hole by a shift."""
    script = Script()
    script.prefill([*first, *([7, 9] * (repeated // 2))])
    script.evict(4, 15)
    script.decode([7, 9, 7])
    script.evict(19, 26, way=Way.REBASED)
    script.decode([9, 7])
    script.close()
    return script


def replayed(
    path: Path, *on: str, gate: Gate = STRICT, opened: OpenEngine = open_engine, script: Script | None = None
) -> ReplayReport:
    log = ScriptLog([script or session([3, 4, 5, 6])], read_model(path).fingerprint)
    return replay(log, on or ("llama",), path, open_engine=opened, gate=gate)


def test_limits_are_those_of_the_gate_or_of_what_rounding_does() -> None:
    gate, wide = Gate(), Agreement(80, 3.0, 0.2, 0.7)
    assert gate.limits(20) == (0.01, 0.9)
    assert gate.limits(2000, Agreement(8000, 0.01, 0.002, 1.0)) == (0.01, 0.9), "rounding never makes a gate narrower"
    assert gate.limits(20, replace(wide, mean_kl=float("inf"))) == (0.01, 0.9), "what is no number excuses nothing"
    mean_kl, top1 = gate.limits(20, wide)
    assert mean_kl == pytest.approx(gate.rounding_times * 0.2)
    assert top1 == pytest.approx(0.695 - 3 * 0.103, abs=0.002)
    assert gate.limits(20000, wide)[1] == pytest.approx(0.695, abs=0.01), "many checkpoints leave nothing to chance"
    right = Agreement(20, 3.0, 0.3, 0.7)
    assert gate.passes(right, wide)
    assert not gate.passes(right)
    assert not gate.passes(replace(right, mean_kl=0.7), wide)
    assert not gate.passes(replace(right, top1=0.35), wide)
    laughter, moved = Agreement(20, 0.02, 0.00699, 0.6), Agreement(80, 0.02, 0.00674, 0.7375)
    assert gate.passes(laughter, moved), "flat logits have many best tokens; how far they are apart is another matter"
    assert not gate.passes(laughter)


def test_what_rounding_does_is_measured_only_where_the_gate_fails(packed: Path) -> None:
    within = replayed(packed, gate=Gate())
    assert within.equal
    assert within.notes == ()
    assert "rounding" not in within.to_json()["sessions"][0]["numbers"]["llama"]

    beside = replayed(packed)
    assert beside.equal, beside.to_json()["first_divergence"]
    told = beside.to_json()["sessions"][0]["numbers"]["llama"]
    assert 0.2 < told["mean_kl"] / told["rounding"]["mean_kl"] < STRICT.rounding_times
    assert told["rounding"]["checkpoints"] == 4 * told["checkpoints"]
    (note,) = beside.notes
    assert note.startswith("llama: session s0: logits are a mean KL of ")
    assert replayed(packed).to_json() == beside.to_json()


def test_only_an_engine_that_rounds_is_held_beside_rounding(packed: Path) -> None:
    """The KL of the other two is that of another order of sums."""
    gate = replace(STRICT, mean_kl=-1.0)
    for engine in ("openvino", "reference"):
        report = replayed(packed, engine, gate=gate)
        assert not report.equal
        assert report.backends[0].roundings == (None,)
    plain = replayed(model_file("llama", n_head=4, n_head_kv=2, head_dim=32), gate=gate)
    assert not plain.equal, "of plain weights nothing is rounded"
    assert plain.backends[0].roundings == (None,)


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_in_the_cache_is_no_matter_of_rounding(packed: Path, fault: str) -> None:
    report = replayed(packed, opened=opens_with(FAULTS[fault]))
    assert not report.equal
    assert report.first_divergence is not None
    assert report.first_divergence.op in ("evict", "shift")
    assert report.first_divergence.finding.what.startswith("witness: ")
    assert report.backends[0].roundings == (None,), "nobody asks how far numbers are from right that are of wrong rows"


class _StaleLogits(Faultless):
    """Holds the right rows, answers each prefill with the logits of the one before."""

    _before: Logits | None = None

    def prefill(self, tokens: Any, tape_start: int) -> Computed:
        computed = super().prefill(tokens, tape_start)
        stale, self._before = self._before, computed.logits
        return computed if stale is None else replace(computed, logits=stale)


class _TurnedLogits(Faultless):
    """Holds the right rows, answers the end of each decode back to front."""

    def decode_until(self, n: int, limit: int, tape_start: int, logits: Logits, choose: Any) -> Any:
        run = super().decode_until(n, limit, tape_start, logits, choose)
        return replace(run, logits=run.logits[::-1].copy())


@pytest.mark.parametrize("fault", [_StaleLogits, _TurnedLogits])
def test_wrong_logits_over_right_rows_are_no_matter_of_rounding(packed: Path, fault: type[LyingBackend]) -> None:
    report = replayed(packed, opened=opens_with(fault))
    assert report.backends[0].residency_equal
    assert not report.equal
    assert report.first_divergence is not None
    what = report.first_divergence.finding.what
    assert what.startswith("logits: mean KL")
    assert "rounding alone moves the reference by" in what


def test_a_text_that_repeats_itself_on_the_real_model() -> None:
    """The limits of the gate are missed twentyfold by an engine that holds and computes the right thing."""
    path = demo_model()
    script = Script()
    script.prefill([3002, *[2229] * 64])
    script.evict(4, 28, way=Way.REBASED)
    script.decode([2229] * 4)
    script.close()
    report = replayed(path, gate=Gate(), script=script)
    (backend,) = report.backends
    (agreement,), (rounding,) = backend.agreements, backend.roundings
    assert backend.residency_equal
    assert agreement is not None
    assert rounding is not None
    assert not Gate().passes(agreement)
    assert 0.2 < agreement.mean_kl / rounding.mean_kl < Gate().rounding_times
    assert report.equal
    assert report.first_divergence is None
    (note,) = report.notes
    assert "numbers say less on such a text" in note
