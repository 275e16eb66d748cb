"""Streaming a long text: figures against the engine's own, memory bounded at every event, on both engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import UsageError
from kvtape.backends.logits import log_softmax
from kvtape.backends.protocol import Engine, SessionConfig
from kvtape.backends.session import DecodeResult, Session
from kvtape.eval.candidates import candidates_of
from kvtape.eval.nll import NllTask, NllTrack, _advance, _Lane, check_task, kl_divergence, run_nll
from kvtape.eval.nll_report import nll_rows
from kvtape.eval.targets import Target, World
from kvtape.eval.texts import long_text
from kvtape.planner.events import Op
from kvtape.planner.specs import SpecError
from support.engines import NATIVE, load_engine
from support.tiny_gguf import write_tiny
from support.trials import TrialListSink

LOGITS = arrays(np.float32, 9, elements=st.floats(-50, 50, width=32))
N_CTX, N_TOKENS = 256, 8 * 256


@pytest.fixture(scope="module", params=NATIVE)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    loaded = load_engine(request.param, write_tiny(tmp_path_factory.mktemp("m") / "t.gguf"))
    config = SessionConfig(chunk=128, kv_type_k="f32", kv_type_v="f32")
    yield Target(request.param, loaded, config)
    loaded.close()


def run(
    target: Target, policies: tuple[str, ...], n_tokens: int, n_ctx: int = N_CTX
) -> tuple[list[NllTrack], TrialListSink]:
    sink = TrialListSink()
    task = NllTask(long_text(target.engine.tokenize, 3, n_tokens), n_ctx, 1000, 3)
    candidates = candidates_of(policies, [])
    check_task(task, target, candidates)
    return run_nll(task, target, 0, candidates, World(sink, ManualClock(), "r")), sink


def test_a_text_eight_times_the_context_streams_within_it(target: Target) -> None:
    policies = ("stream:sink=4,recent=220", "stream:sink=0,recent=224,positions=rebased")
    tracks, sink = run(target, policies, N_TOKENS)
    dense, sunk, bare = tracks
    assert [len(t.nll) for t in tracks] == [N_TOKENS - 1] * 3
    # From the events themselves, not from the task's own account.
    for session in sink.sessions[1:]:
        assert session.n_ctx == N_CTX
        events = [e for e in sink.events if e.session_id == session.session_id]
        resident = [e.resident_tokens for e in events if e.resident_tokens is not None]
        assert len([e for e in events if e.op is Op.EVICT]) > 40
        assert max(resident) == N_CTX
        assert sum(e.n_tokens or 0 for e in events if e.op in (Op.PREFILL, Op.DECODE)) == N_TOKENS
    assert sunk.resident_most == bare.resident_most == N_CTX
    assert dense.resident_most == N_TOKENS
    assert dense.kl == []
    # What fits the context is dense for every policy; what comes later is not.
    assert max(sunk.kl[: N_CTX - 2]) < 1e-9
    assert sunk.nll[: N_CTX - 2] == pytest.approx(dense.nll[: N_CTX - 2], abs=1e-5)
    assert min(max(sunk.kl[N_CTX:]), max(bare.kl[N_CTX:])) > 1e-6
    assert [(r.start, r.stop, r.n_tokens) for r in sink.trials[:3]] == [
        (1, 1000, 999),
        (1000, 2000, 1000),
        (2000, 2048, 48),
    ]
    assert sink.trials[4].nll == pytest.approx(np.mean(sunk.nll[999:1999]))
    assert sink.trials[4].kl == pytest.approx(np.mean(sunk.kl[999:1999]))


def test_the_figures_are_those_of_the_engine_itself(target: Target) -> None:
    tracks, _ = run(target, (), 120)
    tokens = long_text(target.engine.tokenize, 3, 120)
    backend = target.engine.open(SessionConfig(n_ctx=256, kv_type_k="f32", kv_type_v="f32"))
    for at in (1, 17, 64, 119):
        backend.truncate(0)
        logits = backend.prefill(tokens[:at], 0).logits.astype(np.float64)
        expected = np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[tokens[at]]
        assert tracks[0].nll[at - 1] == pytest.approx(expected, abs=2e-4)
    backend.close()


@pytest.mark.parametrize("name", NATIVE)
def test_past_the_trained_context_policies_go_on_and_dense_says_why_it_is_absent(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine: Engine = load_engine(name, write_tiny(tmp_path_factory.mktemp("m") / "t.gguf", n_ctx=512))
    target = Target(name, engine, SessionConfig())
    tracks, sink = run(target, ("stream:sink=4,recent=100",), 700)
    # Gaps as long as there is room, then one compaction: positions never reach the trained context.
    assert [e.reason for e in sink.events if e.op is Op.SHIFT][:1] == ["trained_context"]
    assert tracks[0].absent == "700 tokens do not fit the trained context of 512"
    assert len(tracks[1].nll) == 699
    assert tracks[1].kl == []
    rows = nll_rows(tracks, 700, 1000)
    assert (rows[0]["nll"], rows[0]["absent"]) == (None, tracks[0].absent)
    assert (rows[1]["excess"], rows[1]["kl"], rows[1]["n"]) == (None, None, 699)
    engine.close()


def test_rows_are_stretches_and_a_total() -> None:
    dense, sunk = (NllTrack("b", c) for c in candidates_of(["stream:sink=4,recent=60"], []))
    dense.nll, sunk.nll, sunk.kl = [1.0] * 2499, [1.5] * 999 + [2.5] * 1500, [0.25] * 2499
    rows = nll_rows([dense, sunk], 2500, 1000)
    assert [(r["part"], r["start"], r["stop"], r["n"]) for r in rows[4:]] == [
        ("all", 1, 2500, 2499),
        ("0-1000", 1, 1000, 999),
        ("1000-2000", 1000, 2000, 1000),
        ("2000-2500", 2000, 2500, 500),
    ]
    assert [r["excess"] for r in rows[5:]] == [0.5, 1.5, 1.5]
    assert rows[4]["excess"] == pytest.approx((999 * 0.5 + 1500 * 1.5) / 2499, abs=1e-6)
    assert rows[4]["excess_low"] < rows[4]["excess"] < rows[4]["excess_high"]
    assert (rows[6]["kl"], rows[6]["kl_low"], rows[6]["perplexity"]) == (0.25, 0.25, 12.1825)
    assert rows[0]["excess"] is None


def test_scored_policies_stream_too_and_a_probe_that_nobody_makes_is_no_score(target: Target) -> None:
    on = Target(target.spec, target.engine, SessionConfig(chunk=128, options={"scores": "on"}))
    policies = ("h2o:budget=128,recent=32", "snapkv:budget=128,window=16", "snapkv:budget=128,queries=probe")
    tracks, sink = run(on, policies, 300)
    assert [t.scored for t in tracks] == [None, True, True, False]
    assert [t.resident_most for t in tracks] == [300, 128, 128, 128]
    assert [len(t.nll) for t in tracks] == [299] * 4
    scored = {e.session_id for e in sink.events if e.op is Op.SCORE}
    assert scored == {sink.sessions[1].session_id, sink.sessions[2].session_id}


class Says:
    """A session that always says the same, whatever it is made to take."""

    def __init__(self, logits: list[float]) -> None:
        self.logits = np.array(logits, dtype=np.float32)

    def decode(self, n: int, *, choose: Callable[[np.ndarray], int], stop_tokens: frozenset[int]) -> DecodeResult:
        return DecodeResult(tuple(choose(self.logits) for _ in range(n)), "n")


def test_divergence_is_from_dense_to_the_policy_and_likelihood_is_of_the_text() -> None:
    dense, policy = (0.5, 0.25, 0.25), (0.8, 0.1, 0.1)
    lanes = [
        _Lane(cast("Session", Says(np.log(said).tolist())), "s", NllTrack("b", candidate))
        for said, candidate in zip((dense, policy), candidates_of(["stream:sink=4,recent=60"], []), strict=True)
    ]
    _advance(lanes, [2, 0])
    expected = sum(p * np.log(p / q) for p, q in zip(dense, policy, strict=True))
    assert lanes[0].track.kl == []
    assert lanes[1].track.kl == pytest.approx([expected] * 2, rel=1e-5)
    assert lanes[0].track.nll == pytest.approx([-np.log(0.25), -np.log(0.5)])
    assert lanes[1].track.nll == pytest.approx([-np.log(0.1), -np.log(0.8)])


@given(LOGITS, LOGITS)
def test_divergence_is_zero_of_itself_and_never_negative(a: np.ndarray, b: np.ndarray) -> None:
    p, q = log_softmax(a), log_softmax(b)
    assert np.exp(p).sum() == pytest.approx(1)
    assert kl_divergence(p, p) == 0
    assert kl_divergence(p, q) >= 0
    assert kl_divergence(p, q) == pytest.approx(float(np.sum(np.exp(p) * (p - q))), abs=1e-9)


def test_divergence_is_no_number_where_a_logit_is_none() -> None:
    fine, broken = log_softmax(np.zeros(4, np.float32)), log_softmax(np.array([0, np.nan, 0, 0], np.float32))
    for pair in ((fine, broken), (broken, fine), (broken, broken)):
        assert np.isnan(kl_divergence(*pair))


def test_bad_texts_and_budgets_are_refused_before_anything_runs(target: Target) -> None:
    policies = candidates_of(["stream:sink=4,recent=252"], [])
    with pytest.raises(UsageError, match="the text has 1 tokens; at least 2"):
        check_task(NllTask((5,), 512), target, policies)
    with pytest.raises((UsageError, SpecError), match="256"):
        check_task(NllTask((5,) * 9, 256), target, policies)
    with pytest.raises(UsageError, match="a budget of 300 leaves no room for a new token in a context of 256"):
        check_task(NllTask((5,) * 9, 256), target, candidates_of(["class:budget=300"], []))
