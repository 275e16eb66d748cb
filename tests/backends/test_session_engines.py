"""One Session script on both real engines: same residency, same events. What fails is in the fault matrix."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import InputRejected
from kvtape.backends.protocol import Engine, SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.blocks import PromptSegment
from kvtape.planner.events import Event, Op, Placement
from kvtape.planner.layout import Layout
from kvtape.planner.residency import fold
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink
from support.engines import ENGINES, load_engine
from support.tiny_gguf import write_tiny

_folder = tempfile.TemporaryDirectory(prefix="kvtape-session-")
TOKENS = [int(t) for t in np.random.default_rng(7).integers(3, 259, 600)]


@functools.cache
def engine(name: str) -> Engine:
    path = Path(_folder.name) / "llama.gguf"
    return load_engine(name, path if path.exists() else write_tiny(path, "llama"))


def open_session(name: str, policy: str, sink: ListSink, **session: Any) -> Session:
    config = SessionConfig(n_ctx=256, chunk=64, kv_type_k="f32", kv_type_v="f32", cold_budget_tokens=512)
    backend = engine(name).open(config)
    return Session(backend, parse_policy(policy), sink, ManualClock(), run_id="r", session_id="s", **session)


def positions(layout: Layout) -> list[int]:
    return [p for s in layout for p in range(s.cache_start, s.cache_stop)]


def assert_one_account(session: Session, sink: ListSink) -> None:
    """Fold of what was recorded, the backend's books and the engine's memory say the same."""
    state = fold(sink.events)
    backend = session._parts.backend
    assert backend.books() == state.layout
    witness = backend.witness()
    assert sorted(witness.cache_positions.tolist()) == positions(state.layout)
    for rows in (*witness.rows.keys, *witness.rows.values):
        assert len(rows) == state.resident_tokens
    for event in sink.events:
        if event.reused is not None:
            assert event.reused + (event.forgotten or 0) + (event.prefilled or 0) == event.prompt_tokens


def scripted_decode(session: Session, n: int, seed: int) -> None:
    """Two engines may break a tie of logits apart; the script says the tokens."""
    said = iter(np.random.default_rng(seed).integers(3, 259, n).tolist())
    session.decode(n, choose=lambda _: int(next(said)), stop_tokens=frozenset())


def chat(session: Session, check: Callable[[], None]) -> None:
    """Streaming, divergence, admits, compaction, snapshots: everything a policy with holes goes through."""
    session.ensure_prefix(TOKENS[:400])
    check()
    scripted_decode(session, 90, 1)
    check()
    session.ensure_prefix([*session.tape, *TOKENS[400:430]])
    check()
    block = session.cold_block_ids[-1]
    session.admit(block)
    check()
    if len(session.cold_block_ids) > 1:
        session.admit(session.cold_block_ids[-1], Placement.APPEND)
    check()
    saved = session.snapshot()
    scripted_decode(session, 40, 2)
    session.ensure_prefix([*session.tape[:380], *TOKENS[500:560]])
    check()
    session.restore(saved)
    check()
    session.prefill_suffix(TOKENS[560:600])
    check()
    session.compact()
    check()
    scripted_decode(session, 70, 3)
    check()


POLICIES = (
    "stream:sink=4,recent=60",
    "stream:sink=4,recent=60,positions=rebased",
    "stream:sink=4,recent=60,hole=refill",
    "class:budget=160",
    "class:budget=160,hole=forget,every=16",
)


def logical(event: Event) -> Event:
    """Without what an engine may have of its own: times and bytes."""
    return dataclasses.replace(event, at_ns=0, elapsed_ns=None, kv_bytes=None, detail=None)


@functools.cache
def played(name: str, policy: str, evict_by: str) -> tuple[Event, ...]:
    sink = ListSink()
    with open_session(name, policy, sink, evict_by=evict_by) as session:
        chat(session, lambda: assert_one_account(session, sink))
    return tuple(logical(e) for e in sink.events)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ENGINES)
def test_fold_books_and_memory_agree_after_every_step(name: str, policy: str) -> None:
    events = played(name, policy, "native")
    assert events[-1].op is Op.CLOSE
    assert {Op.EVICT, Op.ADMIT, Op.RESTORE, Op.TRUNCATE} <= {e.op for e in events}


@pytest.mark.parametrize("name", ENGINES)
def test_the_recompute_way_goes_through_too(name: str) -> None:
    events = played(name, "stream:sink=4,recent=60", "recompute")
    assert {str(e.way) for e in events if e.op is Op.EVICT} == {"recompute"}


@pytest.mark.parametrize("policy", POLICIES)
def test_both_engines_leave_the_same_events(policy: str) -> None:
    assert played("llama", policy, "native") == played("openvino", policy, "native")


@pytest.mark.parametrize("name", ENGINES)
def test_pinned_segments_stay_resident_on_the_engine(name: str) -> None:
    sink = ListSink()
    with open_session(name, "stream:sink=0,recent=40", sink) as session:
        system = PromptSegment(kind="system", tokens=tuple(TOKENS[:50]))
        session.ensure_prefix([system, PromptSegment(kind="user", tokens=tuple(TOKENS[50:500]))])
        assert_one_account(session, sink)
        assert all(p in session.resident for p in range(50))


@pytest.mark.parametrize("name", ENGINES)
def test_a_token_that_the_engine_rejects_in_a_later_run_takes_the_whole_decode_back(name: str) -> None:
    sink = ListSink()
    session = open_session(name, "none", sink)
    session.ensure_prefix(TOKENS[:10])
    given = iter([7] * 40 + [session._parts.backend.facts.n_vocab])
    with pytest.raises(InputRejected, match="vocabulary"):
        session.decode(50, choose=lambda _: next(given))
    assert session.tape == tuple(TOKENS[:10])
    assert [str(e.op) for e in sink.events[-2:]] == ["truncate", "refuse"]
    assert_one_account(session, sink)
    session.decode(1)
    session.close()
