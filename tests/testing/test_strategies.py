"""The public strategies draw what they promise, and reach what matters."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import KvtapeError, SessionFatal
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.blocks import Block, PromptSegment, segments_to_blocks
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.events import Event, Op
from kvtape.planner.plan_errors import PlanError
from kvtape.planner.policy_options import POLICY_NAMES
from kvtape.planner.ranges import RangeSet
from kvtape.planner.residency import fold
from kvtape.planner.specs import PolicySpec, parse_policy
from kvtape.testing import strategies
from kvtape.testing.sink import ListSink
from kvtape.testing.toy import ToyBackend

# What is drawn matters here, not the smallest of its kind.
UNSHRUNK = settings(max_examples=1000, deadline=None, phases=[Phase.generate], database=None, derandomize=True)
FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(strategies.block_lists(scored=True))
def test_blocks_are_disjoint_and_scored(blocks: list[Block]) -> None:
    assert RangeSet((b.start, b.stop) for b in blocks).n_tokens == sum(b.n_tokens for b in blocks)
    assert len({b.block_id for b in blocks}) == len(blocks)
    assert all(b.n_tokens > 0 and b.score is not None for b in blocks)


@given(strategies.block_lists(holes=False))
def test_blocks_without_holes_fill_the_tape(blocks: list[Block]) -> None:
    assert len(RangeSet((b.start, b.stop) for b in blocks).ranges) <= 1


@given(strategies.capabilities(cold_store=True))
def test_fixed_capabilities_are_fixed(capabilities: Capabilities) -> None:
    assert capabilities.cold_store


@given(strategies.policy_texts())
def test_policy_texts_parse_and_their_canonical_text_means_the_same(text: str) -> None:
    spec = parse_policy(text)
    assert parse_policy(spec.canonical) == spec
    spec.check_context(64 + 1)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_is_drawn(name: str) -> None:
    assert find(strategies.policies(), lambda p: p.name == name, settings=UNSHRUNK).name == name


@given(strategies.prompts())
def test_prompts_become_blocks(prompt: list[PromptSegment]) -> None:
    assert sum(b.n_tokens for b in segments_to_blocks(prompt)) == sum(len(s.tokens or ()) for s in prompt)


@FEW
@given(strategies.event_logs())
def test_event_logs_fold(events: list[Event]) -> None:
    state = fold(events)
    assert state.next_seq == len(events)
    assert state.resident_tokens <= state.n_ctx == 64


@pytest.mark.parametrize("op", [op for op in Op if op not in (Op.GENERATE, Op.SCORE)])
def test_event_logs_have_every_operation(op: Op) -> None:
    found = find(strategies.event_logs(), lambda events: any(e.op is op for e in events), settings=UNSHRUNK)
    assert fold(found).next_seq == len(found)


@FEW
@given(
    policy=strategies.policies(("none", "stream", "class", "random"), max_tokens=48),
    capabilities=strategies.capabilities(attention_scores=False),
    turns=st.lists(strategies.prompts(max_size=30), min_size=1, max_size=3),
    cold=st.sampled_from([0, 16]),
)
def test_any_policy_on_any_toy_folds(
    policy: PolicySpec, capabilities: Capabilities, turns: list[list[PromptSegment]], cold: int
) -> None:
    """What the strategies are for: whatever is refused, the books are the fold of what was recorded."""
    backend = ToyBackend(SessionConfig(n_ctx=64, chunk=16, cold_budget_tokens=cold), capabilities)
    sink = ListSink()
    try:
        session = Session(backend, policy, sink, ManualClock(), run_id="r", session_id="s")
    except KvtapeError:
        return
    for prompt in turns:
        try:
            session.ensure_prefix(prompt)
            session.decode(2)
        except SessionFatal:
            raise
        except (KvtapeError, PlanError):
            assert sink.events[-1].op is Op.REFUSE
        assert backend.books() == fold(sink.events).layout
    session.close()


def test_without_hypothesis_the_error_names_the_extra() -> None:
    code = "import sys; sys.modules['hypothesis'] = None; import kvtape.testing.strategies"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "kvtape.testing.strategies needs hypothesis; pip install 'kvtape[testing]'" in done.stderr


def test_the_toy_and_the_suite_need_no_hypothesis() -> None:
    code = (
        "import sys; sys.modules['hypothesis'] = None; sys.modules['pytest'] = None\n"
        "import kvtape.testing.toy, kvtape.testing.conformance"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_capability_is_drawn_both_ways() -> None:
    for field in dataclasses.fields(Capabilities):
        assert find(strategies.capabilities(), lambda c, n=field.name: bool(getattr(c, n)), settings=UNSHRUNK)
        assert find(strategies.capabilities(), lambda c, n=field.name: not getattr(c, n), settings=UNSHRUNK)
