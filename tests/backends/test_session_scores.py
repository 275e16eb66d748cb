"""Scored policies through the Session on both engines: what is measured decides what stays, and is on record."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import UnsupportedOperation
from kvtape.backends.protocol import Engine, SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.events import Op
from kvtape.planner.residency import fold
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink
from support.engines import ENGINES, load_engine
from support.tiny_gguf import write_tiny

_folder = tempfile.TemporaryDirectory(prefix="kvtape-scores-")
TOKENS = [int(t) for t in np.random.default_rng(11).integers(3, 259, 400)]
SCORED = (
    "h2o:budget=128,recent=32,block=8",
    "h2o:budget=128,recent=32,block=8,norm=mean",
    "snapkv:budget=128,window=16,block=8",
    "tova:budget=128,block=8",
)


@functools.cache
def engine(name: str) -> Engine:
    path = Path(_folder.name) / "llama.gguf"
    return load_engine(name, path if path.exists() else write_tiny(path, "llama"))


def open_session(name: str, policy: str, sink: ListSink, *, scores: bool = True) -> Session:
    options = {"scores": "on"} if scores else {}
    config = SessionConfig(
        n_ctx=512, chunk=64, kv_type_k="f32", kv_type_v="f32", cold_budget_tokens=512, options=options
    )
    return Session(engine(name).open(config), parse_policy(policy), sink, ManualClock(), run_id="r", session_id="s")


def run(name: str, policy: str, *, scores: bool = True) -> tuple[list[tuple[int, int]], ListSink]:
    sink = ListSink()
    with open_session(name, policy, sink, scores=scores) as session:
        session.ensure_prefix(TOKENS)
        resident = session.resident.as_pairs()
    assert fold(sink.events).closed
    return resident, sink


@pytest.mark.parametrize("policy", SCORED)
def test_scores_decide_what_stays_and_both_engines_agree(policy: str) -> None:
    kept = {}
    for name in ENGINES:
        kept[name], sink = run(name, policy)
        scores = [e for e in sink.events if e.op is Op.SCORE]
        plans = [e for e in sink.events if e.op is Op.PLAN]
        assert scores
        assert [e.seq + 1 for e in scores] == [e.seq for e in plans]
        # What measuring took is told once, by the score event.
        assert all(s.at_ns + (s.elapsed_ns or 0) <= p.at_ns for s, p in zip(scores, plans, strict=True))
        assert not any("scores_missing" in p.diagnostics for p in sink.plans)
    assert kept["llama"] == kept["openvino"]
    without, sink = run("llama", policy, scores=False)
    assert kept["llama"] != without
    assert all("scores_missing" in p.diagnostics for p in sink.plans if p.evict != "[]")


@pytest.mark.parametrize("name", ENGINES)
def test_a_window_that_begins_right_behind_a_hole_asks_one_token_later(name: str) -> None:
    """llama.cpp has no row to go on from there; the plan must not do without scores for that."""
    sink = ListSink()
    with open_session(name, "none:block=8", sink) as session:
        session.ensure_prefix(TOKENS[:100])
        session.evict(40, 84)
        session.set_policy(parse_policy("snapkv:budget=40,window=16,block=8"))
        session.plan_now()
    (score,) = (e for e in sink.events if e.op is Op.SCORE)
    assert json.loads(score.detail or "")["queries"] == 15
    assert not [e for e in sink.events if e.op is Op.REFUSE]
    assert "scores_missing" not in sink.plans[0].diagnostics


@pytest.mark.parametrize("name", ENGINES)
def test_a_question_scores_what_is_kept_and_leaves_nothing(name: str) -> None:
    sink = ListSink()
    with open_session(name, "none:block=8", sink) as session:
        session.ensure_prefix(TOKENS[:300])
        backend = session._parts.backend
        before = backend.books()
        question = TOKENS[300:316]
        measured = session.score(question)
        assert backend.books() == before
        assert measured.mass.shape == (2, 300)
        session.set_policy(parse_policy("snapkv:budget=96,queries=probe,block=8,layers=all"))
        session.plan_now()
        assert session.resident.n_tokens <= 95
        best = int(np.argmax(measured.mass.sum(0)[:200]))
        # The block that the question looks at most is among those that stay.
        assert best in session.resident
        session.prefill_suffix(question)
        session.decode(4, stop_tokens=frozenset())
    assert [str(e.op) for e in sink.events if e.op in (Op.SCORE, Op.PLAN)][:2] == ["score", "plan"]
    assert fold(sink.events).closed


@pytest.mark.parametrize("name", ENGINES)
def test_a_probe_of_other_layers_is_not_used(name: str) -> None:
    sink = ListSink()
    with open_session(name, "snapkv:budget=400,queries=probe,block=8,layers=0", sink) as session:
        session.ensure_prefix(TOKENS[:300])
        session.score(TOKENS[300:316])
        session.set_policy(parse_policy("snapkv:budget=96,queries=probe,block=8"))
        session.plan_now()
    assert ["scores_missing" in p.diagnostics for p in sink.plans] == [True]


@pytest.mark.parametrize("name", ENGINES)
def test_without_a_source_a_score_is_refused(name: str) -> None:
    with open_session(name, "none", ListSink(), scores=False) as session:
        session.ensure_prefix(TOKENS[:20])
        with pytest.raises(UnsupportedOperation, match="score"):
            session.score(TOKENS[:4])
