"""Logs whose prompts waited, as curves, exports, calibration, views and explanations read them: as the eager ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.deferral import waits
from kvtape.planner.events import Op
from kvtape.planner.specs import parse_policy
from kvtape.sim.blocks.from_log import read_log_requests
from kvtape.sim.costs.samples import samples_of
from kvtape.sim.explain.computed import computed_by
from kvtape.sim.explain.moment import recorded_session
from kvtape.testing.toy import open_toy
from kvtape.traces.exporters.requests import prompt_requests
from kvtape.traces.reader import Log, open_log
from kvtape.traces.recorder import Recorder
from support.logs import KEY, run_row

pytestmark = pytest.mark.contract("I6")

THINKING_NS = 1_000_000


def turns(session: Session, clock: ManualClock) -> None:
    """Prefixes of whole blocks with suffixes behind, and a caller who takes its time before it asks for tokens."""
    fresh = iter(range(10_000))
    for n in (32, 64):
        kept = session.tape[: len(session.tape) // 32 * 32]
        session.ensure_prefix([*kept, *(next(fresh) % 60 for _ in range(n))])
        session.prefill_suffix([next(fresh) % 60 for _ in range(5)], kind="tool")
        clock._now += THINKING_NS
        session.decode(4, stop_tokens=frozenset())


@contextmanager
def recorded(path: Path, *, defer: bool) -> Iterator[Log]:
    clock = ManualClock()
    recorder = Recorder(path, run_row("r"), clock=clock, key=KEY)
    backend = open_toy(SessionConfig(n_ctx=256, chunk=64))
    with Session(
        backend,
        parse_policy("none"),
        recorder,
        clock,
        run_id="r",
        session_id="s",
        content=True,
        defer_prefill=defer,
    ) as session:
        turns(session, clock)
    recorder.seal()
    with open_log(path) as log:
        yield log


def test_requests_and_their_blocks_are_those_of_an_eager_log(tmp_path: Path) -> None:
    with recorded(tmp_path / "a.duckdb", defer=False) as eager, recorded(tmp_path / "b.duckdb", defer=True) as lazy:
        one, other = (
            [(r.turn, r.n_tokens, r.output_tokens, r.hashes) for r in prompt_requests(x, "r")] for x in (eager, lazy)
        )
        assert one == other
        assert all(hashes for _, _, _, hashes in one)
        first, second = (read_log_requests(x) for x in (eager, lazy))
        assert first.prompts.tolist() == second.prompts.tolist() == [32, 37, 96, 101]
        assert (first.trace.ids.tolist(), first.trace.starts.tolist()) == (
            second.trace.ids.tolist(),
            second.trace.starts.tolist(),
        )


def test_the_callers_time_is_no_cost_of_the_session(tmp_path: Path) -> None:
    with recorded(tmp_path / "b.duckdb", defer=True) as log:
        events = log.events("r", "s")
        assert sum(waits(e) for e in events) == 4
        samples = list(samples_of(events))
    assert max(s.elapsed_ns for s in samples) < THINKING_NS
    prefills = [s.works[0].tokens for s in samples if s.works[0].kind == "prefill"]
    assert prefills == [e.n_tokens for e in events if e.op is Op.PREFILL] == [37, 64, 5]


def test_a_piece_is_explained_by_the_prompt_of_its_first_token(tmp_path: Path) -> None:
    with recorded(tmp_path / "b.duckdb", defer=True) as log:
        rows = log.sql("SELECT tokens, reason, replaced_tokens FROM why_prefilled ORDER BY seq")[1]
        assert rows == [(37, "cold", 0), (64, "diverged", 9), (5, "suffix", 0)]
        session = recorded_session(log, "r", "s")
        second = [e for e in session.events if e.op is Op.PREFILL][1]
        found = computed_by(session, second.seq)
        assert (found.cut.as_pairs(), found.cut_reason) == ([(32, 41)], "diverged")
