"""Whole replays on both engines: random sessions agree, a log that lies or cannot be replayed is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from kvtape.backends.errors import UnsupportedOperation, UsageError
from kvtape.backends.protocol import Choose, Computed, DecodeRun, Engine, Logits
from kvtape.backends.registry import open_engine
from kvtape.capacity.model import read_model
from kvtape.planner.events import Op, Way
from kvtape.planner.specs import SpecError
from kvtape.replay.replayer import OpenEngine, replay
from kvtape.replay.report import ReplayReport
from kvtape.replay.targets import parse_target
from support.engines import ENGINES
from support.faulty import Faultless, LyingBackend, opens_with
from support.script_log import ScriptLog
from support.scripted import Script
from support.sessions import random_scripts
from support.tiny_gguf import write_tiny

EVERYWHERE = ("llama", "openvino", "llama:way=recompute", "openvino:way=recompute", "openvino:way=recompute,mirror=off")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "llama.gguf", n_head=4, n_head_kv=2, head_dim=32)


class _Kept:
    """An engine that stays loaded when a replay closes it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def loaded() -> OpenEngine:
    """`open_engine` that loads each engine once for the whole module."""
    engines: dict[str, Engine] = {}

    def opened(name: str, path: Path, options: Mapping[str, str]) -> Engine:
        key = json.dumps([name, str(path), dict(options)])
        if key not in engines:
            engines[key] = _Kept(open_engine(name, path, options))
        return engines[key]

    return opened


def long_session(session_id: str = "s0") -> Script:
    """Every kind of event that an engine takes part in."""
    s = Script(session_id=session_id)
    s.prefill(list(range(3, 63)))
    (block,) = s.evict(10, 30, cold=True)
    s.decode([70, 71, 72])
    s.admit(block)
    s.evict(20, 26)
    saved = s.snapshot()
    s.decode([73, 74])
    s.truncate(50)
    s.prefill([80, 81, 82, 83])
    s.restore(saved)
    s.refuse()
    s.refill(20, 26, 20)
    s.evict(5, 12, way=Way.REBASED)
    s.decode([90, 91])
    s.evict(30, 33, way=Way.RECOMPUTE)
    s.decode([92])
    return s


def log_of(model: Path, *scripts: Script, **columns: Any) -> ScriptLog:
    return ScriptLog(scripts or [long_session()], read_model(model).fingerprint, **columns)


def run(log: ScriptLog, model: Path, *on: str, opened: OpenEngine = open_engine) -> ReplayReport:
    return replay(log, on or ENGINES, model, open_engine=opened)


def test_both_engines_both_ways_agree(model: Path, loaded: OpenEngine) -> None:
    fatal = Script(session_id="s1")
    fatal.prefill([5, 6, 7])
    fatal.fatal()
    fatal.refuse()
    fatal.close()
    report = run(log_of(model, long_session(), fatal), model, *EVERYWHERE, opened=loaded)
    assert report.equal, report.to_json()["first_divergence"]
    changing = {Op.TRUNCATE, Op.PREFILL, Op.DECODE, Op.EVICT, Op.ADMIT, Op.SHIFT, Op.RECOMPUTE, Op.RESTORE}
    events = [*long_session().events, *fatal.events]
    for backend in report.backends:
        assert backend.residency_events == backend.witness_positions == sum(e.op in changing for e in events)
        assert backend.events_compared == len(events)
        assert backend.not_executed == 4, "two refusals, the fatal, and the close behind it"
        assert backend.witness_identities == backend.witness_rows > 0
        agreement = backend.agreement
        assert agreement is not None
        assert agreement.checkpoints >= 20 + 3
        assert agreement.max_kl < 1e-9
        assert agreement.top1 == 1.0


@given(script=random_scripts(300))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_sessions_agree(model: Path, loaded: OpenEngine, script: Script) -> None:
    report = run(log_of(model, script), model, "llama", "openvino", "openvino:way=recompute", opened=loaded)
    assert report.equal, report.to_json()["first_divergence"]


def test_the_report_is_the_same_bytes_again(model: Path, loaded: OpenEngine) -> None:
    first, again = (json.dumps(run(log_of(model), model, opened=loaded).to_json()) for _ in range(2))
    assert first == again
    assert "NaN" not in first


# -- the log lies --------------------------------------------------------------------------------------------------


def test_a_recorded_digest_that_is_not_the_folds(model: Path, loaded: OpenEngine) -> None:
    log = log_of(model)
    log.change("s0", 6, resident_digest=1)
    report = run(log, model, opened=loaded)
    first = report.first_divergence
    assert first is not None
    assert (first.seq, first.backend) == (6, "log")
    assert "resident_digest recorded 1" in first.finding.what
    assert len(first.context) == 5
    assert 6 in [entry["seq"] for entry in first.context]
    assert not report.equal
    assert all(b.events_compared == 6 for b in report.backends), "everything before it is still compared"


def test_a_wrong_range_whose_digests_were_forged_too(model: Path, loaded: OpenEngine) -> None:
    """The evict says [20, 25), digests and all; nothing is wrong until the refill of [20, 26) does not fit."""
    log = log_of(model)
    (seq,) = (e.seq for e in long_session().events if e.op == Op.EVICT and e.start == 20)
    log.change("s0", seq, stop=25, n_tokens=5, resident_tokens=None, resident_digest=None, layout_digest=None)
    first = run(log, model, opened=loaded).first_divergence
    assert first is not None
    assert (first.seq, first.backend) == (seq + 1, "log"), "the snapshot bears the true digests"


def test_tokens_that_are_fewer_than_the_event_says(model: Path, loaded: OpenEngine) -> None:
    log = log_of(model)
    tokens = log._tokens["s0"]
    tokens[3] = replace(tokens[3], n_tokens=2, tokens=(tokens[3].tokens or ())[:2])
    first = run(log, model, opened=loaded).first_divergence
    assert first is not None
    assert (first.seq, first.finding.what) == (3, "tokens: 3 were computed, the log keeps 2")


def test_tokens_of_a_forged_row_are_found_by_nobody_but_replayed_as_they_are(model: Path, loaded: OpenEngine) -> None:
    """Content is what it is: replay proves residency of the log's tokens, `verify` proves the log."""
    log = log_of(model)
    tokens = log._tokens["s0"]
    tokens[3] = replace(tokens[3], tokens=(200, 201, 202))
    assert run(log, model, opened=loaded).equal


def test_a_session_stops_at_its_divergence_and_the_next_is_still_replayed(model: Path, loaded: OpenEngine) -> None:
    log = log_of(model, long_session("s0"), long_session("s1"))
    log.change("s0", 2, layout_digest=5)
    report = run(log, model, "llama", opened=loaded)
    assert report.first_divergence is not None
    assert report.first_divergence.session == "s0"
    assert report.backends[0].events_compared == 2 + len(long_session().events)


def test_lost_events_end_the_comparison_and_are_told(model: Path, loaded: OpenEngine) -> None:
    script = Script()
    script.prefill([5, 6, 7])
    script.put_raw(Op.LOST, n_tokens=3)
    report = run(log_of(model, script), model, "llama", opened=loaded)
    assert report.equal
    assert report.notes == ("session s0: events were lost at seq 2; compared up to there",)
    assert report.sessions[0].foldable == 2


# -- engines that differ ---------------------------------------------------------------------------------------------


class _FewerTokens(LyingBackend):
    """Decodes one token less than it is told, and says so."""

    def decode_until(self, n: int, limit: int, tape_start: int, logits: Logits, choose: Choose) -> DecodeRun:
        return super().decode_until(n - 1, limit, tape_start, logits, choose)


class _WrongLogits(Faultless):
    """Holds the right rows, answers nonsense."""

    def prefill(self, tokens: Any, tape_start: int) -> Computed:
        computed = super().prefill(tokens, tape_start)
        return replace(computed, logits=computed.logits[::-1].copy())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_backend_that_decodes_less(model: Path, engine: str) -> None:
    script = Script()
    script.prefill([5, 6, 7])
    script.decode([8, 9, 10])
    first = run(log_of(model, script), model, engine, opened=opens_with(_FewerTokens)).first_divergence
    assert first is not None
    assert (first.seq, first.finding.found) == (2, ((3, 5),))


@pytest.mark.parametrize("engine", ENGINES)
def test_wrong_logits_over_right_rows_fail_the_gate(model: Path, engine: str) -> None:
    script = Script()
    script.prefill(list(range(3, 40)))
    report = run(log_of(model, script), model, engine, opened=opens_with(_WrongLogits))
    backend = report.backends[0]
    assert backend.witness_identities == backend.witness_rows
    assert not report.equal
    assert report.first_divergence is not None
    assert report.first_divergence.finding.what.startswith("logits: mean KL")
    assert report.first_divergence.seq == 1


class _Raises(LyingBackend):
    def do_evict(self, start: int, stop: int) -> None:
        raise UsageError("not today")


def test_a_backend_that_refuses_what_the_log_did(model: Path) -> None:
    script = Script()
    script.prefill(list(range(3, 40)))
    script.evict(4, 9)
    first = run(log_of(model, script), model, "llama", opened=opens_with(_Raises)).first_divergence
    assert first is not None
    assert (first.seq, first.finding.what) == (2, "UsageError: not today")


def test_a_backend_that_changes_something_on_a_refusal(model: Path) -> None:
    class Nervous(LyingBackend):
        looked = 0

        def witness(self) -> Any:
            self.looked += 1
            if self.looked == 2:
                self._inner.evict(1, 2)
            return self._inner.witness()

    script = Script()
    script.prefill([5, 6, 7, 8])
    script.refuse()
    first = run(log_of(model, script), model, "llama", opened=opens_with(Nervous)).first_divergence
    assert first is not None
    assert (first.seq, first.op) == (2, "refuse")


def test_an_ability_that_is_missing_names_the_other_way(model: Path) -> None:
    with pytest.raises(UnsupportedOperation, match=r"seq 2 \(evict\) on openvino:mirror=off.*way=recompute"):
        run(log_of(model), model, "openvino:mirror=off")


# -- asked wrongly ---------------------------------------------------------------------------------------------------


def test_a_log_with_neither_content_nor_hashes_says_what_to_do(model: Path) -> None:
    log = log_of(model)
    log.drop_content("s0")
    with pytest.raises(
        UsageError, match=r"session s0, seq 1: neither its tokens nor their hashes.*record with --content"
    ):
        run(log, model)


def test_another_models_log_says_what_differs(model: Path, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other.gguf", n_layer=3)
    with pytest.raises(UsageError, match=r"other\.gguf: different tensor shapes .*, file size .*, header"):
        run(log_of(model), other)


def test_other_weights_under_the_same_header_are_another_model(model: Path, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other.gguf", n_head=4, n_head_kv=2, head_dim=32, seed=1)
    with pytest.raises(UsageError, match=r"other\.gguf: different weights \("):
        run(log_of(model), other)


def test_an_older_log_is_compared_by_the_five_parts_it_has(model: Path) -> None:
    five, _, weights = read_model(model).fingerprint.rpartition("/")
    report = run(ScriptLog([long_session()], five), model)
    assert report.equal
    assert any("not known" in note and "weights" in note for note in report.notes)
    assert not any("weights" in note for note in run(log_of(model), model).notes)
    with pytest.raises(UsageError, match="the form of the fingerprint"):
        run(ScriptLog([long_session()], f"{five}/{weights}/more"), model)


@pytest.mark.parametrize(
    ("on", "error", "why"),
    [
        ((), UsageError, "name a backend"),
        (("lama",), UsageError, "unknown backend 'lama'"),
        (("llama:way=native,",), SpecError, "neither key=value nor"),
        (("llama:way=fast",), SpecError, "allowed: native, recompute"),
        (("llama:threads=0",), SpecError, "at least 1"),
        (("llama:colour=red",), UsageError, "option of llama .colour."),
        (("reference:engine=markov",), UsageError, "unknown engine .markov."),
        (("reference:engine=standard:window=64",), UsageError, "without an event"),
    ],
)
def test_targets_that_cannot_be(model: Path, on: tuple[str, ...], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        replay(log_of(model), on, model)


def test_no_model_no_sessions(model: Path) -> None:
    with pytest.raises(UsageError, match="--model"):
        replay(log_of(model), ["llama"])
    with pytest.raises(UsageError, match="no session"):
        replay(ScriptLog([], "x"), ["llama"], model)


def test_target_specs_are_split_between_replay_and_engine() -> None:
    target = parse_target("openvino:way=recompute,mirror=off,threads=2")
    assert (target.engine, target.way, target.lineage_way) == ("openvino", "recompute", "recompute")
    assert (target.threads, target.options) == (2, {"mirror": "off"})


def test_a_session_of_double_rows_is_replayed_on_every_engine(model: Path) -> None:
    script = Script()
    script.prefill(list(range(3, 40)))
    script.evict(4, 9)
    script.decode([50])
    log = log_of(model, script, kv_type_k="f64", kv_type_v="f64")
    report = run(log, model, *ENGINES, "reference:dtype=float64")
    assert report.equal, report.first_divergence
    assert [b.kv_types for b in report.backends] == ["f32/f32", "f32/f32", "f32/f32", "f64/f64"]


@pytest.mark.parametrize("odd", [{"yarn": 4}, {"arch": "qwen2moe"}], ids=["yarn", "experts"])
def test_what_the_reference_computes_is_identified_and_compared(odd: dict[str, Any], tmp_path: Path) -> None:
    """Scaled keys are told apart from the tokens' own, experts compute what llama.cpp's do."""
    model = write_tiny(tmp_path / "odd.gguf", **odd)
    script = Script()
    script.prefill(list(range(3, 40)))
    script.evict(4, 9)
    script.decode([50])
    report = run(log_of(model, script), model, "llama", "llama:way=recompute", "reference", "reference:way=recompute")
    assert report.equal, report.first_divergence
    for told in report.to_json()["backends"]:
        assert told["witness_identities"] > 0
        assert told["max_kl"] < 1e-6


def test_a_model_that_is_not_covered_is_judged_by_residency_and_never_called_equal(tmp_path: Path) -> None:
    odd = write_tiny(tmp_path / "windowed.gguf", "gemma3")
    script = Script()
    script.prefill(list(range(3, 40)))
    script.evict(4, 9)
    script.decode([50])
    report = run(log_of(odd, script), odd, "llama")
    assert not report.equal
    assert report.first_divergence is None
    assert report.backends[0].residency_equal
    assert report.backends[0].reference is None
    assert "not covered" in report.notes[0]
    body = report.to_json()["backends"][0]
    assert (body["mean_kl"], body["witness_identities"], body["witness_positions"]) == (None, 0, 3)


def test_progress_counts_events(model: Path, loaded: OpenEngine) -> None:
    seen: list[tuple[str, int, int]] = []
    note: Callable[[str, int, int], None] = lambda session, seq, total: seen.append((session, seq, total))  # noqa: E731
    replay(log_of(model), ["llama"], model, open_engine=loaded, progress=note)
    n = len(long_session().events)
    assert seen == [("s0", i, n) for i in range(n)]


def test_a_quantised_model_passes_the_gate_on_every_engine(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "q8.gguf", weights="q8_0", n_embd=128, head_dim=64)
    script = Script()
    script.prefill([int(t) for t in np.random.default_rng(0).integers(3, 300, 60)])
    script.evict(4, 20)
    script.decode([7, 8, 9])
    report = run(log_of(path, script, kv_type_k="f16", kv_type_v="f16"), path)
    assert report.equal, report.to_json()
    llama, openvino, own = report.backends
    assert (llama.kv_types, llama.tolerances.identity) == ("f16/f16", 0.05)
    assert own.kv_types == "f32/f32"
    assert openvino.kv_types == "f32/f32"


def test_half_precision_weights_and_high_positions(tmp_path: Path) -> None:
    """Engines take RoPE's angles in f32: at position 4,000 rows are still identified, and turned by 3,700 they fit."""
    for weights, identity in (("f32", 1e-3), ("f16", 1e-2)):
        path = write_tiny(tmp_path / f"{weights}.gguf", weights=weights)
        script = Script(n_ctx=512)
        while script.state.tape_length < 3900:
            if script.state.tape_length:
                script.evict(
                    script.state.layout[-1].tape_start if len(script.state.layout) > 1 else 4,
                    script.state.tape_length - 100,
                )
            script.prefill([int(t) for t in np.random.default_rng(script.state.tape_length).integers(3, 300, 250)])
        last = script.state.layout[-1]
        script.shift(last.cache_start, last.cache_stop, 4 - last.cache_start)
        script.decode([7, 8, 9])
        report = run(log_of(path, script, n_ctx=512, chunk=256), path)
        assert report.equal, report.to_json()["first_divergence"]
        assert {b.tolerances.identity for b in report.backends} == {identity}
