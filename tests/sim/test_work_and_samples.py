"""What a modelled engine is charged for is what calibration reads out of the events: one account of the work, twice."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtape.backends.errors import UsageError
from kvtape.backends.modelled.work import Work
from kvtape.backends.session import Session
from kvtape.planner.events import Op
from kvtape.sim.costs.model import CostTable
from kvtape.sim.costs.samples import samples_of
from kvtape.sim.errors import CostsError
from kvtape.sim.world.reading import read_scripts
from kvtape.sim.world.running import simulate
from kvtape.sim.world.settings import Settings
from kvtape.testing.sink import ListSink
from support.logs import event
from support.simulated import MemoryLog, flat_costs, recorded_toy

BESIDE = ("plan", "session")
POLICIES = (
    "stream:sink=2,recent=14,block=4",
    "stream:sink=2,recent=14,block=4,positions=rebased",
    "class:budget=28,block=4",
    "class:budget=28,block=4,hole=forget",
)
Play = list[tuple[str, int, int]]
PLAYS = st.lists(
    st.tuples(st.sampled_from(["say", "again", "decode", "save", "back"]), st.integers(1, 30), st.integers(0, 40)),
    min_size=2,
    max_size=9,
)


@dataclass(frozen=True)
class _Account(CostTable):
    """Prices as flat costs do, and writes down what for."""

    done: list[Work] = field(default_factory=list)

    def cost_ns(self, work: Work) -> int:
        if work.kind not in BESIDE:
            self.done.append(work)
        return super().cost_ns(work)


def _played(session: Session, play: Play) -> None:
    saved: list[int] = []
    for kind, n, at in [("say", 12, 0), *play]:
        with suppress(UsageError):
            if kind == "say":
                session.ensure_prefix([*session.tape, *[(at + i) % 50 for i in range(n)]])
            elif kind == "again":
                session.ensure_prefix([*session.tape[:at], *[(at + i) % 50 for i in range(n)]])
            elif kind == "decode":
                session.decode(n, stop_tokens=frozenset())
            elif kind == "save":
                saved.append(session.snapshot())
            elif saved:
                session.restore(saved[at % len(saved)])


REFILLED: Play = [("say", 30, 5), ("decode", 8, 0), ("say", 20, 9), ("say", 4, 2)]


@settings(deadline=None, max_examples=50)
@example("class:budget=28,block=4", 64, 0, REFILLED)
@example("class:budget=28,block=4", 64, 64, REFILLED)
@example("stream:sink=2,recent=14,block=4,positions=rebased", 36, 0, REFILLED)
@given(st.sampled_from(POLICIES), st.sampled_from([36, 64]), st.sampled_from([0, 64]), PLAYS)
def test_events_tell_the_work_that_was_charged(policy: str, n_ctx: int, cold: int, play: Play) -> None:
    recorded = recorded_toy(lambda session: _played(session, play), policy, n_ctx=n_ctx, cold_tokens=cold)
    prices = flat_costs()
    account, sink = _Account(prices.origin, prices.kinds), ListSink()
    simulate(read_scripts(MemoryLog([recorded])), Settings(arrivals="closed"), account, sinks=[sink])
    told = [work for sample in samples_of(sink.events) for work in sample.works if work.kind not in BESIDE]
    assert told == account.done


def test_a_session_that_cannot_be_folded_is_no_ground_for_costs() -> None:
    with pytest.raises(CostsError, match=r"session s0 seq 2 .*kvtape verify"):
        list(
            samples_of(
                [
                    event(0, Op.OPEN, n_tokens=64),
                    event(1, Op.PROMPT, turn=1, start=0, n_tokens=8),
                    event(2, Op.PREFILL, turn=1, start=4, stop=8, n_tokens=4, cache_start=0, elapsed_ns=1),
                    event(3, Op.RECOMPUTE, turn=1, start=0, stop=4, n_tokens=4, cache_start=0, elapsed_ns=1),
                ]
            )
        )
