"""Real engines that do the wrong thing while their books say the right one: each must be seen, where it happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtape.capacity.model import read_model
from kvtape.planner.events import Op, Way
from kvtape.replay.replayer import replay
from kvtape.replay.report import ReplayReport
from support.engines import ENGINES
from support.faulty import FAULTS, Faultless, LyingBackend, opens_with
from support.script_log import ScriptLog
from support.scripted import Script
from support.tiny_gguf import write_tiny

AT_EVICT, AT_SHIFT = "evict", "shift"
EXPECTED = {
    "ForgetsToEvict": (AT_EVICT, "witness: 40 rows at cache positions .*, expected 28"),
    "EvictsOneTooMany": (AT_EVICT, "witness: 27 rows at cache positions .*, expected 28"),
    "EvictsTheNeighbour": (AT_EVICT, "witness: 28 rows at cache positions .*, expected 28"),
    "SkipsTheShift": (AT_SHIFT, "witness: 22 rows at cache positions"),
    "ShiftsOneTooFew": (AT_SHIFT, "witness: 22 rows at cache positions"),
    "MovesWithoutTurning": (AT_SHIFT, "witness: 14 rows do not hold their token"),
    "TurnsTwice": (AT_SHIFT, "witness: 14 rows do not hold their token"),
    "TurnsTwiceInLayer1": (AT_SHIFT, "witness: layer 1: moved keys are not the old keys"),
    "WrongKeysInLayer1": (AT_EVICT, "witness: layer 1: keys changed in place"),
    "WrongValues": (AT_EVICT, "witness: layer 0: values changed"),
    "OneBitInOneRow": (AT_EVICT, "witness: layer 1: values changed, 1 rows"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "llama.gguf", n_head=4, n_head_kv=2, head_dim=32)


def session() -> Script:
    """One evict that keeps positions, one whose hole is closed by a shift."""
    script = Script()
    script.prefill(list(range(3, 43)))
    script.evict(4, 16)
    script.decode([60, 61])
    script.evict(20, 28, way=Way.REBASED)
    script.decode([62])
    script.close()
    return script


def replayed(model: Path, engine: str, kind: type[LyingBackend]) -> ReplayReport:
    log = ScriptLog([session()], read_model(model).fingerprint)
    return replay(log, [engine], model, open_engine=opens_with(kind))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_wrapper_itself_is_no_fault(model: Path, engine: str) -> None:
    report = replayed(model, engine, Faultless)
    assert report.equal, report.to_json()["first_divergence"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_planted_fault_is_caught_where_it_happens(model: Path, engine: str, fault: str) -> None:
    report = replayed(model, engine, FAULTS[fault])
    assert not report.equal
    first = report.first_divergence
    assert first is not None
    op, what = EXPECTED[fault]
    seq = next(e.seq for e in session().events if e.op == Op(op))
    assert (first.session, first.seq, first.op, first.backend) == ("s0", seq, op, engine)
    assert re.match(what, first.finding.what), first.finding.what
