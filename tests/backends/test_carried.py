"""Accumulated attention across snapshots: what was counted before one is there after its restore, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import InputRejected
from kvtape.backends.protocol import Engine, SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink
from support.engines import ENGINES, load_engine
from support.tiny_gguf import write_tiny

TOKENS = [(7 * i * i + 3 * i) % 250 + 3 for i in range(300)]
POLICIES = ("h2o:budget=128,recent=32,block=8", "h2o:budget=128,recent=32,block=8,norm=mean")


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    loaded = load_engine(request.param, write_tiny(tmp_path_factory.mktemp("m") / "t.gguf"))
    yield loaded
    loaded.close()


def dense_session(engine: Engine, sink: ListSink) -> Session:
    config = SessionConfig(n_ctx=512, chunk=64, kv_type_k="f32", kv_type_v="f32", options={"scores": "on"})
    session = Session(
        engine.open(config), parse_policy("none:block=8"), sink, ManualClock(), run_id="r", session_id="s"
    )
    session.ensure_prefix(TOKENS)
    return session


def planned(session: Session, policy: str) -> list[tuple[int, int]]:
    session.set_policy(parse_policy(policy))
    session.plan_now()
    return session.resident.as_pairs()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_restored_session_plans_on_what_was_counted_before_the_snapshot(engine: Engine, policy: str) -> None:
    with dense_session(engine, ListSink()) as plain:
        expected = planned(plain, policy)
    sink = ListSink()
    with dense_session(engine, sink) as session:
        saved = session.snapshot()
        for _ in range(2):
            session.restore(saved)
            session.set_policy(parse_policy("none:block=8"))
            # Attention of a branch that the restore leaves behind must not count.
            session.prefill_suffix([5] * 40)
            session.restore(saved)
            assert planned(session, policy) == expected
    assert not any("scores_missing" in p.diagnostics for p in sink.plans)


def test_what_stands_where_other_tokens_were_cut_inherits_nothing(engine: Engine) -> None:
    policy = POLICIES[0]
    with dense_session(engine, ListSink()) as session:
        session.snapshot()
        session.ensure_prefix(TOKENS[:200])
        session.ensure_prefix(TOKENS[:200] + [9] * 100)
        after_cut = planned(session, policy)
    with dense_session(engine, ListSink()) as plain:
        plain.ensure_prefix(TOKENS[:200])
        plain.ensure_prefix(TOKENS[:200] + [9] * 100)
        assert planned(plain, policy) == after_cut


def test_a_cut_takes_what_was_carried_from_its_first_position_on(engine: Engine) -> None:
    with dense_session(engine, ListSink()) as session:
        session.snapshot()
        session.ensure_prefix(TOKENS[:200], need_logits=False)
        carried = session._parts.carried
        assert carried is not None
        assert carried.tape_positions.tolist() == list(range(200))
        assert carried.mass.shape == carried.peak.shape == (2, 200)


def test_a_plan_may_be_asked_for_below_the_policys_own_limit(engine: Engine) -> None:
    with dense_session(engine, ListSink()) as session:
        assert planned(session, "stream:sink=4,recent=60,block=8") == [(0, 300)]
        session.plan_now(65)
        assert session.resident.as_pairs() == [(0, 4), (240, 300)]
        with pytest.raises(InputRejected, match="at least 2"):
            session.plan_now(1)
