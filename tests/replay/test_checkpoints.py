"""Where logits are compared."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.planner.events import Op
from kvtape.replay.checkpoints import plan_checkpoints
from support.scripted import Script
from support.sessions import random_scripts


@given(script=random_scripts(300, max_steps=25), wanted=st.integers(0, 40))
@settings(max_examples=80, deadline=None)
def test_as_many_as_wanted_or_every_token(script: Script, wanted: int) -> None:
    executed = {
        (e.seq, k) for e in script.events if e.op in (Op.PREFILL, Op.DECODE) for k in range(1, (e.n_tokens or 0) + 1)
    }
    chosen = plan_checkpoints(script.events, wanted)
    assert chosen <= executed
    assert len(chosen) >= min(wanted, len(executed))
    assert len(chosen) <= wanted + 2, "only the two around the evicts come on top"


@given(script=random_scripts(300))
@settings(max_examples=60, deadline=None)
def test_the_first_queries_after_the_first_and_last_evict_are_among_them(script: Script) -> None:
    evicts = [e.seq for e in script.events if e.op == Op.EVICT]
    chosen = plan_checkpoints(script.events, 3)
    for seq in evicts[:1] + evicts[-1:]:
        query = next(e for e in script.events[seq:] if e.op in (Op.PREFILL, Op.DECODE))
        assert (query.seq, 1) in chosen


def test_free_places_come_first_and_reach_to_the_end() -> None:
    script = Script()
    script.prefill(list(range(100)))
    script.decode(list(range(40)))
    chosen = plan_checkpoints(script.events, 20)
    # A decode shows every token's logits and a prefill its last one's, so that the prefill need not be cut.
    assert {(seq, k) for seq, k in chosen if seq == 1} <= {(1, 100)}
    assert (2, 40) in chosen
