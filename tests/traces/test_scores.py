"""Scores and trials in the log: what a session measured stands beside the plan that went by it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtape.backends.protocol import AttentionMass, SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.events import Op
from kvtape.planner.rows import TrialRow
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink
from kvtape.testing.toy import ToyBackend, open_toy
from kvtape.traces.errors import NotALog, SequenceConflict
from kvtape.traces.reader import Log, open_log
from kvtape.traces.recorder import Recorder
from kvtape.traces.verify import verify
from support.forge import edit_log
from support.logs import KEY, TickClock, certification_row, run_row, write_log

N_LAYERS = 2
CONFIG = SessionConfig(n_ctx=64, chunk=16, options={"scores": "on"})


def record(path: Path, backend: ToyBackend) -> Path:
    recorder = Recorder(path, run_row(), clock=TickClock(), key=KEY)
    policy = parse_policy("snapkv:budget=24,window=4,block=4")
    with Session(backend, policy, recorder, TickClock(), run_id="r0", session_id="s0") as session:
        session.ensure_prefix(list(range(3, 60)))
    recorder.seal()
    return path


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    return open_log(record(tmp_path_factory.mktemp("scores") / "a.duckdb", open_toy(CONFIG)))


class Remembering(ToyBackend):
    """Keeps what it was asked to measure."""

    measured: AttentionMass | None = None

    def score(self, *args: object, **rest: object) -> AttentionMass:
        self.measured = super().score(*args, **rest)  # type: ignore[arg-type]
        return self.measured


def test_a_score_event_has_one_row_for_each_block_that_was_measured() -> None:
    backend = Remembering(CONFIG, open_toy(CONFIG).capabilities)
    sink = ListSink()
    with Session(backend, parse_policy("none:block=4"), sink, TickClock(), run_id="r0", session_id="s0") as session:
        session.ensure_prefix(list(range(3, 25)))
        session.evict(8, 14)
        session.score([40, 41])
    measured = backend.measured
    assert measured is not None
    (event,) = (e for e in sink.events if e.op is Op.SCORE)
    assert [(s.start, s.stop) for s in sink.scores] == [(0, 4), (4, 8), (14, 16), (16, 20), (20, 22)]
    assert {s.seq for s in sink.scores} == {event.seq}
    positions = measured.tape_positions
    for row in sink.scores:
        inside = (positions >= row.start) & (positions < row.stop)
        for stored, rows in ((row.mass, measured.mass), (row.peak, measured.peak)):
            assert stored == pytest.approx(rows[:, inside].sum(axis=1), rel=1e-6)
    assert len(json.loads(str(event.detail))["layers"]) == N_LAYERS == len(sink.scores[0].mass)


def test_attention_that_is_no_number_is_a_refusal_and_not_a_row() -> None:
    class Broken(Remembering):
        def score(self, *args: object, **rest: object) -> AttentionMass:
            return replace(super().score(*args, **rest), mass=np.full_like(self.measured.mass, np.nan))  # type: ignore[union-attr]

    sink = ListSink()
    policy = parse_policy("snapkv:budget=24,window=4,block=4")
    backend = Broken(CONFIG, open_toy(CONFIG).capabilities)
    with Session(backend, policy, sink, TickClock(), run_id="r0", session_id="s0") as session:
        session.ensure_prefix(list(range(3, 60)))
    assert not sink.scores
    assert any(e.op is Op.REFUSE and "not finite" in str(e.reason) for e in sink.events)
    assert all("scores_missing" in p.diagnostics for p in sink.plans)


def test_the_log_says_which_score_a_block_had_when_it_went(log: Log) -> None:
    _, rows = log.sql("SELECT plan_seq, seq, block_id, rank, mass, given_up, policy, queries FROM scored ORDER BY ALL")
    evicted = {(seq, block) for seq, plan in log.plans("r0", "s0").items() for block, *_ in json.loads(plan.evict)}
    assert evicted
    assert {(plan, block) for plan, _, block, *_, given, _, _ in rows if given} <= evicted
    by_plan = {plan: [r for r in rows if r[0] == plan] for plan, *_ in rows}
    assert set(by_plan) == set(log.plans("r0", "s0"))
    stored = {(s.seq, s.block_id): sum(s.mass) for s in log.scores("r0", "s0")}
    for plan, found in by_plan.items():
        assert plan is not None
        assert [r[1] for r in found] == [found[0][1]] * len(found)
        assert found[0][1] < plan
        assert sorted(r[3] for r in found)[0] == 1
        assert all(r[4] == pytest.approx(stored[r[1], r[2]]) and r[7] == 4 for r in found)
    assert {r[6] for r in rows} == {log.session("r0", "s0").policy}


def test_numbers_of_the_engine_are_under_the_chain_but_not_in_the_logical_digest(log: Log, tmp_path: Path) -> None:
    louder = ["UPDATE scores SET mass = list_transform(mass, lambda x: x * 2)"]
    with open_log(edit_log(log.path, tmp_path / "b.duckdb", louder, rechain=True)) as other:
        assert other.logical_digest() == log.logical_digest()
        assert other.chain_digest != log.chain_digest
    result = verify(edit_log(log.path, tmp_path / "c.duckdb", louder, rechain=False))
    assert {(str(f.kind), f.table) for f in result.findings} == {("altered", "scores")}
    with open_log(edit_log(log.path, tmp_path / "d.duckdb", ["DELETE FROM scores"], rechain=True)) as other:
        assert other.logical_digest() != log.logical_digest()


def trial(number: int, **changes: object) -> TrialRow:
    row = TrialRow(
        run_id="r0", trial=number, session_id=f"t{number}", task="needle", policy="none", n_tokens=3, seed=7,
        region="middle", start=10, stop=14, expected="Oslo", answer="Oslo", correct=True, kl=0.25, budget_tokens=None,
    )  # fmt: skip
    return replace(row, **changes)


def test_trials_come_back_and_their_numbers_go_up(tmp_path: Path) -> None:
    rows = [trial(0), trial(1, correct=False, answer="", nll=1.5, kl=None), trial(4)]
    path = tmp_path / "a.duckdb"
    with Recorder(path, run_row(), clock=TickClock(), key=KEY) as recorder:
        recorder.add_trials(rows[:1])
        recorder.add_trials(rows[1:])
        recorder.add_trials([])
        with pytest.raises(SequenceConflict, match="trial 4 came, the last of run r0 is 4"):
            recorder.add_trials([trial(5), trial(4)][1:])
        with pytest.raises(ValueError, match="not finite"):
            recorder.add_trials([trial(5), trial(6, nll=float("nan"))])
    with open_log(path) as log:
        assert log.trials("r0") == rows
    with Recorder(path, run_row(), clock=TickClock(), key=KEY, resume=True) as recorder:
        with pytest.raises(SequenceConflict):
            recorder.add_trials([trial(4)])
        recorder.add_trials([trial(5)])
        recorder.seal()
    assert verify(path).ok
    with open_log(path) as log:
        assert [t.trial for t in log.trials("r0")] == [0, 1, 4, 5]


def test_a_log_without_these_tables_is_named(tmp_path: Path) -> None:
    path = write_log(tmp_path / "a.duckdb")
    drops = ["DROP VIEW scored", "DROP TABLE trials"]
    edit_log(path, tmp_path / "b.duckdb", drops, rechain=False)
    with pytest.raises(NotALog, match="without the tables trials"):
        open_log(tmp_path / "b.duckdb")


# -- certifications ------------------------------------------------------------------------------------------------


def test_certifications_are_rows_of_the_log_and_go_on_after_a_resume(tmp_path: Path) -> None:
    rows = [certification_row(0, value=1.5, low=1.25), certification_row(4, ability="speed", verdict="pass")]
    path = tmp_path / "a.duckdb"
    recorder = Recorder(path, run_row(), clock=TickClock(), key=KEY)
    recorder.add_certifications(rows)
    recorder.add_certifications([])
    recorder.close()
    recorder = Recorder(path, run_row(), clock=TickClock(), key=KEY, resume=True)
    with pytest.raises(SequenceConflict, match="certification 4 came, the last of run r0 is 4"):
        recorder.add_certifications([certification_row(4)])
    with pytest.raises(ValueError, match="not finite"):
        recorder.add_certifications([certification_row(5), certification_row(6, threshold=float("nan"))])
    recorder.add_certifications([certification_row(5)])
    recorder.seal()
    assert verify(path).ok
    with open_log(path) as log:
        assert log.certifications() == [*rows, certification_row(5)]
        assert log.sql("SELECT verdict, count(*) FROM certifications GROUP BY ALL ORDER BY 1")[1] == [
            ("fail", 2),
            ("pass", 1),
        ]
