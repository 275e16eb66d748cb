"""Every engine of the catalogue beside `standard`: twenty prompts of a real text, 64 decode steps behind each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import UsageError
from kvtape.backends.reference.engines.engine import EngineInfo
from kvtape.backends.reference.engines.harness import Harness
from kvtape.backends.reference.engines.registry import EngineChoice, engine_entries, parse_engine
from kvtape.backends.reference.engines.standard import StandardEngine
from kvtape.backends.reference.errors import BackendFailure, StateInvalidated
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.cached_loop import generate_cached
from kvtape.backends.reference.model.ffn import FfnRouter
from kvtape.backends.reference.model.weights import Weights
from kvtape.eval.engine_accuracy import EngineComparison, EngineTrack
from kvtape.eval.engine_cases import QUESTION_TOKENS, EngineCase, text_cases
from kvtape.eval.engine_contracts import verdict_of
from kvtape.eval.engine_report import accuracy_row
from kvtape.eval.engine_streams import parted_streams
from kvtape.planner.grammar import OptionValue
from support.llama_tiny import engine as tiny_engine
from support.reference import SHAPES, weights
from support.repository import ROOT

PROMPTS, PROMPT, STEPS, WINDOW = 20, 24, 64, 40
# Every engine of the catalogue, in a spec in which what is its own happens within the steps.
SPECS = {
    "apollo": "apollo:layer=1",
    "boundary-kv": "boundary-kv:chunk=20",
    "boundary-per-layer": "boundary-per-layer:window=16",
    "markov-rs": "markov-rs:window=16",
    "markov-rs-codec": "markov-rs-codec:window=16",
    "no-cache": "no-cache",
    "standard": f"standard:window={WINDOW}",
    "turbo-quant": "tq4",
    "windowed-checkpoint": f"windowed-checkpoint:window={WINDOW}",
}
EXACT = {"boundary-kv", "markov-rs", "no-cache"}


@functools.cache
def _tokens() -> list[int]:
    return tiny_engine(**SHAPES["llama"]).tokenize((ROOT / "cli" / "text" / "essay.txt").read_text(encoding="utf-8"))


def _cases(n: int = PROMPTS, prompt: int = PROMPT, steps: int = STEPS) -> list[EngineCase]:
    return text_cases("essay", _tokens(), n=n, prompt_tokens=prompt, steps=steps)


def _compared(
    choices: list[EngineChoice], cases: list[EngineCase], steps: int = STEPS, top_k: int = 5, ns: int = 1
) -> list[EngineTrack]:
    comparison = EngineComparison(weights("llama"), choices, steps=steps, top_k=top_k, clock=ManualClock(ns))
    for case in cases:
        comparison.add(case)
    return comparison.tracks


@pytest.fixture(scope="module")
def tracks() -> dict[str, EngineTrack]:
    return dict(zip(SPECS, _compared([parse_engine(spec) for spec in SPECS.values()], _cases()), strict=True))


def test_no_engine_is_left_out() -> None:
    assert set(SPECS) == {entry.name for entry in engine_entries()}


@pytest.mark.parametrize("name", sorted(SPECS))
def test_every_engine_serves_every_step_and_keeps_its_promise(name: str, tracks: dict[str, EngineTrack]) -> None:
    track = tracks[name]
    row = accuracy_row(track, weights("llama").report())
    assert row["prompts"] == PROMPTS
    if name == "apollo":  # a question may find nothing in its store: it is not served then, and not wrong
        assert row["kept"] is None
        assert 0 < row["served"] <= row["asked"]
        assert row["match_rate"] < row["served_rate"]
        return
    assert (row["asked"], row["served"], row["decode_steps"]) == (PROMPTS * 65, PROMPTS * 65, PROMPTS * 64)
    assert row["kept"] is True, row["why"]
    if name in EXACT:
        assert row["identical_steps"] == row["served"]
        assert (row["mean_kl"], row["nll_delta"], row["match_rate"], row["max_difference"]) == (0, 0, 1, 0)
        assert row["first_divergence"] is None
    else:
        assert row["identical_steps"] < row["served"]
        assert row["mean_kl"] > 0
        assert row["max_kl"] >= row["mean_kl"]


@pytest.mark.parametrize("name", ["standard", "windowed-checkpoint"])
def test_a_window_is_exact_within_and_visibly_not_after(name: str, tracks: dict[str, EngineTrack]) -> None:
    steps = tracks[name].steps
    within = [step for step in steps if step.context <= WINDOW]
    after = [step for step in steps if step.context > WINDOW]
    assert len(within) == PROMPTS * (WINDOW - PROMPT + 1)
    assert all(step.identical for step in within)
    assert not any(step.identical for step in after)
    assert np.mean([step.kl for step in after]) > 1e-4


def test_coded_rows_are_near_and_prefills_exact(tracks: dict[str, EngineTrack]) -> None:
    track = tracks["turbo-quant"]
    assert len(track.cosines) == PROMPTS
    assert all(0.99 < cosine < 0.9999 for pair in track.cosines for cosine in pair)
    assert {step.step for step in track.steps if step.identical} == {0}


def _claims(spec: str, base: str, **changes: object) -> EngineChoice:
    """The engine `spec` under the promise of `base`."""
    real, claimed = parse_engine(spec), parse_engine(base)

    def make(info: EngineInfo, options: Mapping[str, OptionValue]) -> object:
        engine = real.entry.make(info, real.options)
        engine.info = replace(info, contract=claimed.entry.contract, **changes)  # type: ignore[misc,arg-type]
        return engine

    return EngineChoice(replace(claimed.entry, make=make), claimed.options)  # type: ignore[arg-type]


class _OneBit(StandardEngine):
    def decode_step(self, weights: Weights, ffn: FfnRouter, token: int) -> Floats:
        hidden = super().decode_step(weights, ffn, token)
        return np.nextafter(hidden, np.float32(np.inf))


def test_a_promise_that_is_broken_is_seen() -> None:
    """First token right and later ones wrong; a bound that is too tight; a window that is none, or one short; a bit."""
    standard = parse_engine("standard")
    choices = [
        _claims("standard:window=30", "standard"),
        _claims("tq3", "tq4", bound=0.995),
        _claims("standard:window=10", "markov-rs-codec", bound=1e-6),
        _claims("standard:window=30", "windowed-checkpoint"),
        _claims("tq3", "boundary-per-layer", bound=None),
        _claims("standard:window=39", "windowed-checkpoint:window=40"),
        EngineChoice(replace(standard.entry, make=lambda info, options: _OneBit(info)), standard.options),
    ]
    tracks = _compared(choices, _cases(3, steps=20), steps=20)
    verdicts = [verdict_of(track) for track in tracks]
    assert [verdict.kept for verdict in verdicts] == [False, False, False, False, None, False, False]
    assert verdicts[0].why.startswith(f"{3 * 14} of {3 * 21} differ, first at prompt 0, step 7, by ")
    assert "at least 0.995 is promised" in verdicts[1].why
    assert "at most 1e-06 is promised" in verdicts[2].why
    assert "no stated bound" in verdicts[4].why
    assert verdicts[5].why.startswith("3 of 51 differ, first at prompt 0, step 16")
    assert verdicts[6].why.startswith("60 of 63 differ, first at prompt 0, step 1")
    assert [accuracy_row(track, weights("llama").report())["identical_steps"] for track in tracks[:1]] == [21]


class _Failing(StandardEngine):
    """The sixth step fails, as a server's layer may."""

    def decode_step(self, weights: Weights, ffn: FfnRouter, token: int) -> Floats:
        if self._n_tokens == PROMPT + 5:
            raise StateInvalidated("as planned") if self._held else BackendFailure("as planned")
        return super().decode_step(weights, ffn, token)


def test_what_is_not_served_is_not_wrong() -> None:
    standard = parse_engine("standard")
    failing = EngineChoice(replace(standard.entry, make=lambda info, options: _Failing(info)), standard.options)
    track, whole = _compared([failing, standard], _cases(3, steps=20), steps=20)
    row = accuracy_row(track, weights("llama").report())
    assert (row["asked"], row["served"], row["match_rate"]) == (3 * 21, 3 * 6, 1)
    assert row["served_rate"] == pytest.approx(6 / 21)
    assert row["problems"] == {"BackendFailure": 3}
    assert row["first_problem"] == "BackendFailure: as planned"
    assert row["kept"] is True
    assert verdict_of(whole).kept is True


class _NotANumber(StandardEngine):
    def decode_step(self, weights: Weights, ffn: FfnRouter, token: int) -> Floats:
        return super().decode_step(weights, ffn, token) * np.float32(np.nan)


def test_logits_that_are_no_numbers_are_not_served() -> None:
    """A divergence of NaN must not come out as none."""
    codec = parse_engine("markov-rs-codec")
    choice = EngineChoice(replace(codec.entry, make=lambda info, options: _NotANumber(info)), codec.options)
    (track,) = _compared([choice], _cases(2, steps=4), steps=4)
    row = accuracy_row(track, weights("llama").report())
    assert (row["asked"], row["served"], row["problems"]) == (10, 2, {"BackendFailure": 2})


def test_more_likely_tokens_than_there_are() -> None:
    (track,) = _compared([parse_engine("standard")], _cases(1, steps=1), steps=1, top_k=10**6)
    assert [step.overlap for step in track.steps] == [1, 1]


def test_an_engine_that_refuses_the_model_serves_nothing() -> None:
    track, answer = _compared([parse_engine("apollo"), parse_engine("apollo:layer=1")], _cases(2, steps=4), steps=4)
    row = accuracy_row(track, weights("llama").report())
    assert (row["served"], row["served_rate"], row["match_rate"], row["mean_kl"], row["memory"]) == (
        0,
        0,
        None,
        None,
        None,
    )
    assert row["problems"] == {"ExecutionRefused": 2}
    assert (row["kept"], row["why"]) == (None, "nothing was served")
    assert answer.stages["windows_ingested"] == 1
    assert answer.stages["rows_computed"] == PROMPT + 4
    assert _cases(1)[0].context_and_question[1] == _cases(1)[0].prompt[-QUESTION_TOKENS:]


def test_forced_by_standard_the_first_other_choice_is_where_free_generation_parts() -> None:
    model = weights("llama")
    cases = [replace(case, continuation=None) for case in _cases(3, steps=30)]
    (track,) = _compared([parse_engine("tq3")], cases, steps=30)
    parts = []
    for case in cases:
        streams = [Harness(parse_engine(spec), model).greedy(case.prompt, 31) for spec in ("standard", "tq3")]
        parts.append(next((i for i, (a, b) in enumerate(zip(*streams, strict=True)) if a != b), None))
    found = [[s.step for s in track.steps if s.case == i and not s.same_top] for i in range(3)]
    assert [steps[0] if steps else None for steps in found] == parts
    assert any(part is not None for part in parts)
    row = accuracy_row(track, model.report())
    assert row["first_divergence"] == min(part for part in parts if part is not None)
    assert row["diverged_prompts"] == sum(part is not None for part in parts)


def test_steps_say_what_plain_mathematics_says() -> None:
    """Against a softmax in float64 over the engines' own logits."""
    model, case = weights("llama"), _cases(1, steps=6)[0]
    (track,) = _compared([parse_engine("tq3")], [case], steps=6)
    assert case.continuation is not None
    forced = [list(Harness(parse_engine(s), model).forced(case.prompt, case.continuation)) for s in ("standard", "tq3")]
    for step, exact, coded, token in zip(track.steps, *forced, case.continuation, strict=True):
        p, q = (np.exp(x.astype(float)) / np.exp(x.astype(float)).sum() for x in (exact, coded))
        assert step.kl == pytest.approx((p * np.log(p / q)).sum(), rel=1e-6, abs=1e-12)
        assert step.nll_delta == pytest.approx(np.log(p[token]) - np.log(q[token]), rel=1e-6, abs=1e-12)
        assert step.overlap == len(set(np.argsort(p)[-5:]) & set(np.argsort(q)[-5:])) / 5
        assert step.same_top == (p.argmax() == q.argmax())


def test_token_streams_are_those_of_a_loop_that_is_no_engine() -> None:
    """standard, markov-bounded and none, on twenty prompts of a real text."""
    model = weights("llama")
    for case in _cases(PROMPTS, 30, 8):
        assert parted_streams(model, case.prompt, 8, 16) == {"standard": None, "markov-bounded": None, "none": None}


def test_a_stream_that_parts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = weights("llama"), _cases(1)[0].prompt
    free = generate_cached(model, prompt, 5)
    wrong = [*free[:3], (free[3] + 1) % model.n_vocab, free[4]]
    monkeypatch.setattr("kvtape.eval.engine_streams.generate_cached", lambda *_: wrong)
    assert parted_streams(model, prompt, 5, 100) == {"standard": 3, "markov-bounded": 3, "none": 3}


def test_a_run_repeats_to_the_byte_but_for_its_times() -> None:
    rows = []
    for ns in (1, 1000):
        (track,) = _compared([parse_engine("tq4")], _cases(2, steps=4), steps=4, ns=ns)
        rows.append(accuracy_row(track, weights("llama").report()))
    assert rows[0].pop("prefill_tokens_s") == 1000 * rows[1].pop("prefill_tokens_s")
    assert rows[0].pop("decode_tokens_s") == 1000 * rows[1].pop("decode_tokens_s")
    assert rows[0] == rows[1]


@given(n=st.integers(1, 9), prompt=st.integers(1, 20), steps=st.integers(1, 20), length=st.integers(0, 400))
def test_stretches_of_a_text_stand_apart(n: int, prompt: int, steps: int, length: int) -> None:
    tokens = list(range(length))
    if n * (prompt + steps + 1) > length:
        with pytest.raises(UsageError, match=f"t: {length} tokens are too few for {n} prompts of {prompt}"):
            text_cases("t", tokens, n=n, prompt_tokens=prompt, steps=steps)
        return
    cases = text_cases("t", tokens, n=n, prompt_tokens=prompt, steps=steps)
    seen = [t for case in cases for t in (*case.prompt, *(case.continuation or ()))]
    assert len(cases) == n
    assert sorted(set(seen)) == seen
    assert all(len(case.prompt) == prompt and len(case.continuation or ()) == steps + 1 for case in cases)
    assert n == 1 or seen[-1] == length - 1
