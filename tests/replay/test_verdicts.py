"""What two backends hold after an event is compared, not only each with the log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvtape.backends.protocol import Backend
from kvtape.capacity.model import read_model
from kvtape.planner.layout import Layout, Segment, remove
from kvtape.planner.residency import RESIDENCY_OPS
from kvtape.replay.findings import Gate, Tolerances
from kvtape.replay.numbers import Agreement, merge
from kvtape.replay.report import BackendReport
from kvtape.replay.runner import SessionRun, run_session
from kvtape.replay.story import Story, read_story
from kvtape.replay.targets import Target, parse_target
from kvtape.replay.verdicts import SessionNumbers, below_gate, between_backends
from support.engines import load_engine
from support.faulty import Faultless, LyingBackend
from support.script_log import ScriptLog
from support.scripted import Script
from support.tiny_gguf import write_tiny

NATIVE, OTHER = parse_target("llama"), parse_target("openvino")
REBUILT = parse_target("openvino:way=recompute")


def story() -> Story:
    script = Script()
    script.prefill(list(range(3, 23)))
    script.evict(4, 8)
    log = ScriptLog([script], "fingerprint")
    (row,) = log.sessions(log.default_run().run_id)
    return read_story(row, script.events, script.tokens)


def run(*layouts: Layout) -> SessionRun:
    """One that saw these layouts after the story's residency-changing events."""
    seqs = [e.seq for e in story().events if e.op in RESIDENCY_OPS]
    held = dict(zip(seqs, layouts, strict=True))
    return SessionRun(Tolerances(0.05, 0.02), "f32/f32", True, layouts=held)


WHOLE = (Segment(0, 20, 0),)
GAP = remove(WHOLE, 4, 8)
CLOSED = (Segment(0, 4, 0), Segment(8, 12, 4))
OTHER_RANGE = remove(WHOLE, 5, 9)


@pytest.mark.parametrize(
    ("second", "held", "what"),
    [
        (OTHER, GAP, None),
        (OTHER, CLOSED, "same tokens at different cache positions"),
        (REBUILT, CLOSED, None),
        (OTHER, OTHER_RANGE, "different tape positions"),
        (REBUILT, OTHER_RANGE, "different tape positions"),
    ],
)
def test_tape_positions_always_and_cache_positions_where_the_way_is_one(
    second: Target, held: Layout, what: str | None
) -> None:
    found = between_backends(story(), [NATIVE, second], [run(WHOLE, GAP), run(WHOLE, held)])
    assert (found is None) == (what is None)
    if found is not None and what is not None:
        assert what in found.finding.what
        assert (found.op, found.backend) == ("evict", second.spec)


class _WrongBooks(LyingBackend):
    """The engine does right, the books are one token off after an evict."""

    def evict(self, start: int, stop: int) -> None:
        self.do_evict(start, stop)
        self._ideal = remove(self._ideal, start + 1, stop + 1)


def test_what_a_diverging_backend_held_is_kept_for_the_comparison(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "llama.gguf", "llama")
    script = Script()
    script.prefill(list(range(3, 23)))
    script.evict(4, 8)
    log = ScriptLog([script], read_model(path).fingerprint)
    (row,) = log.sessions(log.default_run().run_id)
    told = read_story(row, script.events, script.tokens)
    engine = load_engine("llama", path)

    class Opens:
        name, version, facts = engine.name, engine.version, engine.facts
        kind: type[LyingBackend] = Faultless

        def open(self, config: object) -> Backend:
            return self.kind(engine.open(config))  # type: ignore[arg-type, return-value]

    opens = Opens()
    right = run_session(told, NATIVE, opens, None)  # type: ignore[arg-type]
    opens.kind = _WrongBooks
    wrong = run_session(told, OTHER, opens, None)  # type: ignore[arg-type]
    engine.close()
    assert wrong.divergence is not None
    found = between_backends(told, [NATIVE, OTHER], [right, wrong])
    assert found is not None
    assert found.seq == wrong.divergence.seq
    assert "different tape positions" in found.finding.what


def test_every_session_is_held_to_the_gate_by_itself() -> None:
    """A thousand right places of one session do not hide three wrong ones of another."""
    right, wrong = Agreement(1000, 1e-6, 1e-6, 1.0), Agreement(3, 0.5, 0.4, 1.0)
    assert merge([right, wrong]).mean_kl < Gate().mean_kl  # type: ignore[union-attr]
    told = [story(), story()]
    seq = told[0].events[-1].seq
    numbers = [SessionNumbers(right, seq), SessionNumbers(wrong, seq), SessionNumbers(None, None)]
    assert below_gate(Gate(), NATIVE, told[:1], numbers[:1]) is None
    found = below_gate(Gate(), NATIVE, [*told, story()], numbers)
    assert found is not None
    assert "mean KL 0.4 nats" in found.finding.what
    assert found.seq == seq
    report = BackendReport(
        *("llama", "native", "1", "f32/f32"),
        events_compared=3,
        residency_events=2,
        witness_positions=2,
        witness_rows=20,
        witness_identities=20,
        witness_unclear=0,
        not_executed=0,
        agreements=(right, wrong, None),
        roundings=(None, None, None),
        reference="numpy",
        reference_reason=None,
        tolerances=Tolerances(0.05, 0.02),
        diverged=False,
    )
    assert not report.equal(Gate())
    assert report.to_json(Gate())["worst_session_mean_kl"] == 0.4
    alone = replace(report, agreements=(right,), roundings=(None,))
    assert alone.equal(Gate())
    assert not replace(alone, witness_identities=19).equal(Gate())
    assert not replace(alone, reference=None).equal(Gate())
