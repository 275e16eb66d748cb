"""The strict order, read from the log: prefill, score, evict, and only then the question. On both engines."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvtape.backends import scoring
from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import UnsupportedOperation
from kvtape.backends.parts import Parts
from kvtape.backends.protocol import AttentionMass, Engine, SessionConfig, Witness
from kvtape.backends.session import Session
from kvtape.eval.candidates import Candidate, candidates_of
from kvtape.eval.needle import NeedleTask, NeedleTrial, prepare, run_needle
from kvtape.eval.needle_report import needle_rows
from kvtape.eval.places import Regions
from kvtape.eval.prompts import NeedlePrompt
from kvtape.eval.targets import NullSink, Target, World
from kvtape.planner.events import Event, Op
from kvtape.planner.residency import fold
from kvtape.planner.rows import PlanRow, RunRow
from kvtape.planner.scores import ScoreRequest
from kvtape.planner.specs import parse_policy
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from support.engines import ENGINES, load_engine
from support.tiny_gguf import write_tiny
from support.trials import TrialListSink

RUN = RunRow(
    run_id="r", kind="live", config_digest="", config="{}", seed=None, kvtape_version="", engine_versions="{}",
    started_at_ns=0,
)  # fmt: skip
POLICIES = (
    "stream",
    "random:recent=16",
    "snapkv:sink=4,recent=16,queries=probe",
    "snapkv:sink=4,window=16",
    "tova:sink=4,recent=16",
    "h2o:sink=4,recent=16",
)
CANDIDATES = candidates_of(POLICIES, [96])
TASK = NeedleTask("city", (0, 1), ("middle", "recent"), Regions(4, 92, 4, 92), 400)
STEPS = (Op.RESTORE, Op.SCORE, Op.PLAN, Op.EVICT, Op.PROMPT, Op.PREFILL, Op.GENERATE, Op.DECODE)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    loaded = load_engine(request.param, write_tiny(tmp_path_factory.mktemp("m") / "t.gguf"))
    yield loaded
    loaded.close()


def target(engine: Engine, *, scores: bool = True) -> Target:
    options = {"scores": "on"} if scores else {}
    config = SessionConfig(chunk=128, kv_type_k="f32", kv_type_v="f32", options=options)
    return Target(engine.name, engine, config)


@pytest.fixture(scope="module")
def ran(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[NeedleTrial]]:
    """A log of every trial, and their outcomes."""
    path = tmp_path_factory.mktemp("log") / "e.duckdb"
    on = target(engine)
    recorder = Recorder(path, RUN, clock=ManualClock())
    world = World(recorder, ManualClock(), "r", content=True)
    trials = run_needle(TASK, [on], prepare(TASK, [on], CANDIDATES), CANDIDATES, world)
    recorder.seal()
    return path, trials


def trials_of(events: list[Event]) -> list[list[Event]]:
    """A session's events, from each restore to the next."""
    starts = [i for i, e in enumerate(events) if e.op is Op.RESTORE]
    return [events[a:b] for a, b in pairwise([*starts, len(events)])]


def test_the_log_has_the_order_and_the_evidence(ran: tuple[Path, list[NeedleTrial]]) -> None:
    path, trials = ran
    with open_log(path) as log:
        rows = log.trials("r")
        sessions = [row.session_id for row in log.sessions("r")]
        assert len(sessions) == 4
        asked = 0
        for session_id in sessions:
            events = log.events("r", session_id)
            assert fold(events).closed
            first = [e.op for e in events[: next(i for i, e in enumerate(events) if e.op is Op.RESTORE)]]
            assert first == [Op.OPEN, Op.PROMPT, *[Op.PREFILL] * 3, Op.SNAPSHOT]
            for candidate, steps in zip(CANDIDATES, trials_of(events), strict=True):
                _check_trial(candidate, steps, log.plans("r", session_id))
                asked += 1
    assert asked == len(rows) == len(trials) == 4 * len(CANDIDATES)
    for row, trial in zip(rows, trials, strict=True):
        assert (row.task, row.seed, row.region) == ("needle", trial.seed, trial.region)
        assert row.policy == trial.candidate.policy_of(trial.seed).canonical
        assert (row.answer, row.correct) == (trial.said, trial.correct)


def _check_trial(candidate: Candidate, steps: list[Event], plans: dict[int, PlanRow]) -> None:
    ops = [e.op for e in steps if e.op is not Op.CLOSE]
    assert set(ops) <= set(STEPS)
    # Each kind of step comes in its turn and never again later.
    assert ops == sorted(ops, key=STEPS.index)
    assert ops.count(Op.PROMPT) == ops.count(Op.PREFILL) == 1
    assert ops.count(Op.SCORE) == (1 if candidate.wants_scores else 0)
    assert ops.count(Op.PLAN) == (0 if candidate.budget is None else 1)
    for event in steps:
        if event.op is Op.PLAN:
            plan = plans[event.seq]
            assert plan.hot_tokens <= 96
            assert "scores_missing" not in (plan.diagnostics or "")
        if event.op is Op.PROMPT:
            assert event.reason == "suffix"


class Watched:
    """What the engine's memory held before and after every probe, and what was resident before each question."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.probes: list[tuple[Witness, Witness]] = []
        self.logits: list[np.ndarray] = []
        score, suffix = Session.score, Session.prefill_suffix

        def watched_score(session: Session, tokens: tuple[int, ...]) -> AttentionMass:
            backend = session._parts.backend
            before = backend.witness()
            measured = score(session, tokens)
            self.probes.append((before, backend.witness()))
            return measured

        def watched_suffix(session: Session, tokens: tuple[int, ...]) -> object:
            done = suffix(session, tokens)
            assert session.logits is not None
            self.logits.append(session.logits.copy())
            return done

        monkeypatch.setattr(Session, "score", watched_score)
        monkeypatch.setattr(Session, "prefill_suffix", watched_suffix)


def test_a_probe_leaves_no_row_and_a_restored_trial_is_a_fresh_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    on, task = target(engine), NeedleTask("passkey", (5,), ("middle",), Regions(4, 92, 4, 92), 400)
    prompts = prepare(task, [on], CANDIDATES)
    watched = Watched(monkeypatch)
    trials = run_needle(task, [on], prompts, CANDIDATES, World(NullSink(), ManualClock(), "r"))
    assert len(watched.probes) == 1
    before, after = watched.probes[0]
    assert len(before.cache_positions) == len(prompts[0][0].context)
    np.testing.assert_array_equal(before.cache_positions, after.cache_positions)
    for old, new in zip((*before.rows.keys, *before.rows.values), (*after.rows.keys, *after.rows.values), strict=True):
        np.testing.assert_array_equal(old, new)
    for candidate, trial, logits in zip(CANDIDATES, trials, list(watched.logits), strict=True):
        kept, fresh = fresh_trial(on, prompts[0][0], candidate)
        assert kept == trial.kept
        np.testing.assert_array_equal(fresh, logits)


def fresh_trial(on: Target, prompt: NeedlePrompt, candidate: Candidate) -> tuple[int, np.ndarray]:
    """The same trial on a session of its own, with nothing saved and nothing restored."""
    with World(NullSink(), ManualClock(), "r").session(on, parse_policy("none"), "s", 512) as session:
        session.ensure_prefix(prompt.context, need_logits=False)
        session.set_policy(candidate.policy_of(prompt.seed))
        if "probe" in candidate.label:
            session.score(prompt.question)
        if candidate.budget is not None:
            session.plan_now(candidate.budget + 1)
        kept = session.resident.n_tokens
        session.set_policy(parse_policy("none"))
        session.prefill_suffix(prompt.question)
        assert session.logits is not None
        return kept, session.logits.copy()


def test_without_scores_a_scored_policy_keeps_what_the_window_keeps(engine: Engine) -> None:
    on = target(engine, scores=False)
    candidates = candidates_of(["stream", "snapkv:sink=4,queries=probe", "h2o:sink=4,recent=16"], [96])
    sink = TrialListSink()
    trials = run_needle(TASK, [on], prepare(TASK, [on], candidates), candidates, World(sink, ManualClock(), "r"))
    by_policy = [[t for t in trials if t.candidate is c] for c in candidates]
    assert [t.scored for t in trials[:4]] == [None, None, False, False]
    for scored in by_policy[2:]:
        assert [(t.said, t.kept) for t in scored] == [(t.said, t.kept) for t in by_policy[1]]
    assert [row.trial for row in sink.trials] == list(range(len(trials)))


def test_an_engine_that_refuses_to_measure_is_not_counted_as_scored(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = target(engine)
    candidates = candidates_of(["stream", "snapkv:sink=4,window=16", "h2o:sink=4,recent=16"], [96])

    def refused(parts: Parts, request: ScoreRequest) -> AttentionMass:
        raise UnsupportedOperation("score", "not today")

    monkeypatch.setattr(scoring, "_window", refused)
    trials = run_needle(TASK, [on], prepare(TASK, [on], candidates), candidates, World(NullSink(), ManualClock(), "r"))
    assert [row["scored"] for row in needle_rows(trials)] == [None, None, False, True] * 2
