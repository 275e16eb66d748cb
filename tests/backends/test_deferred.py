"""Deferred prefill on the toy backend: the same as without, in fewer calls; and every way in which it can end."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtape.planner.events import Op
from kvtape.testing.toy import TOY_CAPABILITIES
from kvtape.testing.toy_model import N_VOCAB
from support.deferring import Pair, Sessions, calls, opened
from support.toys import toy_backend

pytestmark = pytest.mark.contract("I6")

POLICIES = (
    "none",
    "none:hole=forget,block=4",
    "stream:sink=2,recent=9,block=4",
    "stream:sink=0,recent=5,positions=rebased,block=8",
    "stream:sink=3,recent=7,hole=refill,split=no,block=4",
    "class:budget=24,block=4",
    "class:budget=20,hole=forget,every=5,recent=3,block=4",
    "h2o:budget=22,recent=4,block=4",
    "snapkv:budget=20,window=3,pool=3,block=4",
    "tova:budget=18,grace=4,block=4",
    "random:budget=20,seed=3,block=4",
)


def lazy(policy: str = "none", *, n_ctx: int = 64, chunk: int = 16, **more: int) -> Sessions:
    return Sessions(toy_backend(n_ctx, TOY_CAPABILITIES, chunk=chunk, **more), policy, defer=True)


def ops(one: Sessions) -> list[str]:
    return [str(e.op) for e in one.sink.events]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    policy=st.sampled_from(POLICIES),
    script=calls(),
    cold=st.sampled_from([0, 8, 64]),
    scores=st.booleans(),
    recompute=st.booleans(),
)
def test_a_deferring_session_decides_and_keeps_what_an_eager_one_does(
    policy: str, script: list[tuple[str, int, int]], cold: int, scores: bool, recompute: bool
) -> None:
    """Tape, layout, cold blocks, blocks, plans, logits to the bit and generated tokens, wherever nothing waits."""
    caps = dataclasses.replace(TOY_CAPABILITIES, attention_scores=scores)
    make = lambda: toy_backend(48, caps, cold, chunk=8, n_ctx_train=200)  # noqa: E731
    eager, deferring = opened(make, policy, evict_by="recompute" if recompute else "native")
    Pair(eager, deferring, N_VOCAB).play(script)
    eager.session.close()
    deferring.session.close()


def test_prefix_and_suffixes_are_one_call() -> None:
    one = lazy()
    one.session.ensure_prefix([1, 2, 3])
    one.session.prefill_suffix([4, 5])
    one.session.prefill_suffix([6])
    assert one.backend.operations == []  # type: ignore[attr-defined]
    assert one.session.tape == (1, 2, 3, 4, 5, 6)
    assert (one.session.pending_tokens, one.session.resident.n_tokens) == (6, 0)
    one.session.decode(2)
    assert ops(one) == ["open", "prompt", "prompt", "prompt", "prefill", "generate", "decode"]
    (prefill,) = (e for e in one.sink.events if e.op is Op.PREFILL)
    assert (prefill.physical_prefill_calls, prefill.physical_prefill_tokens) == (1, 6)
    assert (prefill.deferred_prefill_calls, prefill.deferred_prefill_tokens) == (3, 6)
