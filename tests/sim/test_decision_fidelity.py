"""What a scored policy keeps live on llama.cpp, against its simulation from a dense log of the same tape."""

from __future__ import annotations

import functools

import pytest

from kvtape.backends.clock import ManualClock, StoppableClock
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.session import Session
from kvtape.backends.shadow import open_shadow
from kvtape.planner.specs import parse_policy
from kvtape.sim.quality.agreement import Agreement, agreement
from kvtape.sim.world.running import simulate
from kvtape.sim.world.settings import Settings
from kvtape.testing.sink import ListSink
from support.llama_tiny import engine, tokens
from support.simulated import flat_costs, scored_script

CONFIG = SessionConfig(n_ctx=512, chunk=64, kv_type_k="f32", kv_type_v="f32", options={"scores": "on"})
PROMPT, ANSWER = 300, 60
POLICIES = {
    "h2o:budget=160,recent=32,block=8": 0.95,
    "h2o:budget=160,recent=32,block=8,norm=mean": 0.75,
    "snapkv:budget=160,window=16,block=8": 0.85,
    "tova:budget=160,block=8": 0.9,
}
"""Least mean share of equal tokens: 1.00, 0.85, 0.95 and 0.99 were measured. The model's weights are drawn."""


@functools.cache
def recorded(policy: str, every: int | None) -> ListSink:
    clock, sink = StoppableClock(ManualClock(1000)), ListSink()
    shadow = None if every is None else open_shadow(engine(), CONFIG, clock, tokens=512, every=every)
    said = tokens(PROMPT + ANSWER, seed=5)
    answer = iter(said[PROMPT:])
    with Session(
        engine().open(CONFIG), parse_policy(policy), sink, clock, run_id="r", session_id="s", shadow=shadow
    ) as session:
        session.ensure_prefix(said[:PROMPT])
        session.decode(ANSWER, choose=lambda _: next(answer, None), stop_tokens=frozenset())
    return sink


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_eviction_is_the_same_and_later_ones_nearly(policy: str) -> None:
    sink = ListSink()
    script = scored_script(recorded("none:block=8", 1))
    simulate([script], Settings(policy=policy), flat_costs(), sinks=[sink])
    found = agreement(recorded(policy, None).events, sink.events)
    assert found.equal
    assert len(found.shares) >= 6
    assert found.mean >= POLICIES[policy]


def test_a_run_agrees_with_itself_and_not_with_one_that_keeps_others() -> None:
    one, other = (recorded(policy, None).events for policy in ("tova:budget=160,block=8", "class:budget=160,block=8"))
    assert agreement(one, one) == Agreement(agreement(one, one).shares, None, True)
    assert set(agreement(one, one).shares) == {1.0}
    found = agreement(one, other)
    assert not found.equal
    assert found.first is not None
    assert found.mean < 0.9
