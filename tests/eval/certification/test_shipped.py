"""The shipped certifications: verdicts follow from their numbers, and here the numbers come again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import UsageError
from kvtape.backends.llama.engine import LlamaEngine
from kvtape.backends.proofs import check
from kvtape.backends.proofs.machine import machine_class
from kvtape.backends.proofs.rows import Measure, ProofRow
from kvtape.backends.proofs.store import Proofs, shipped_rows
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.session import Session
from kvtape.cli.engine_text import essay
from kvtape.cli.models import demo_model
from kvtape.eval.certification.bench import Bench
from kvtape.eval.certification.catalog import BASES, chosen_knobs
from kvtape.eval.certification.round_trip import range_round_trip
from kvtape.eval.certification.size import row_bytes
from kvtape.eval.certification.smoke import FULL, smoke_of
from kvtape.eval.certification.thresholds import judged_today
from kvtape.eval.certification.verdicts import outcome_of
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink

pytestmark = pytest.mark.contract("I5")

ROWS = Proofs(shipped_rows()).current("certification")
EIGHT_BITS = "k=q8_0,v=q8_0,fa=on"


def test_both_engines_and_their_base_precisions_are_there() -> None:
    assert {row.engine for row in ROWS} == set(BASES)
    subjects = {row.subject for row in ROWS}
    assert {knob.asked for knob in BASES.values()} <= subjects
    assert EIGHT_BITS in subjects


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.engine}-{row.subject}")
def test_its_verdict_is_what_the_table_of_today_says_of_its_numbers(row: ProofRow) -> None:
    for measure in row.measures:
        assert measure == judged_today(measure)
    if "auto" not in row.subject:
        assert outcome_of(row.measures).verdict == row.verdict


@pytest.fixture(scope="module")
def engine() -> Iterator[LlamaEngine]:
    with closing(LlamaEngine.load(demo_model())) as loaded:
        yield loaded


def eight_bits(engine: LlamaEngine) -> ProofRow:
    """The shipped row of this model on this version of the engine."""
    row = next(r for r in ROWS if (r.engine, r.subject) == ("llama", EIGHT_BITS))
    assert (row.fingerprint, row.engine_version) == (engine.facts.fingerprint, engine.version)
    return row


def test_the_numbers_come_again(engine: LlamaEngine) -> None:
    """Bytes on every machine; logits, whose last bits are the kernels', where the row is of this machine class."""
    row = eight_bits(engine)
    smoke = smoke_of(engine.tokenize(essay()), FULL, engine.facts.n_ctx_train)
    assert row.settings == smoke.settings
    config = chosen_knobs("llama", ["q8_0"], ["on"])[0].config(SessionConfig(chunk=FULL.chunk))
    bench = Bench(engine, config, smoke, ManualClock())

    def told(measures: Iterable[Measure]) -> list[Measure | str]:
        return [m if row.machine == machine_class() or m.unit.startswith("bytes") else m.name for m in measures]

    for ability, measure in (("capacity", row_bytes), ("round_trip", range_round_trip)):
        assert told(measure(bench)) == told(m for m in row.measures if m.ability == ability)


def test_a_session_opens_on_what_is_shipped_as_passing_and_on_nothing_else(
    engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a machine of the row's class, whatever this one is, and not on one of another."""
    monkeypatch.setenv("KVTAPE_PROOFS", str(tmp_path / "none.json"))
    asked = SessionConfig(n_ctx=256, kv_type_k="q8_0", kv_type_v="q8_0", flash_attention="on")

    def opened(config: SessionConfig) -> ListSink:
        sink, backend = ListSink(), engine.open(config)
        with closing(backend):
            Session(backend, parse_policy("none"), sink, ManualClock(), run_id="r", session_id="s").close()
        return sink

    of_row = eight_bits(engine).machine
    monkeypatch.setattr(check, "machine_class", lambda: of_row)
    assert '"certified": true' in str(opened(asked).events[0].detail)
    with pytest.raises(UsageError, match="not certified"):
        opened(replace(asked, kv_type_v="q5_0"))
    monkeypatch.setattr(check, "machine_class", lambda: f"{of_row}+other")
    with pytest.raises(UsageError, match="not certified"):
        opened(asked)
