"""I4: the identities of the counters hold for any session, and each finds the row that was forged."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import KvtapeError
from kvtape.backends.session import Session
from kvtape.backends.speculation.lookup import PromptLookup
from kvtape.planner.events import Event, Op
from kvtape.planner.plan import PlanError
from kvtape.planner.specs import parse_policy
from kvtape.replay.identities import IDENTITIES, IdentityCheck, check_identities
from kvtape.replay.opt_ins import deferral_findings
from kvtape.testing.sink import ListSink
from kvtape.testing.toy import ToyBackend
from kvtape.traces.codec import to_arrow
from kvtape.traces.schema import EVENTS
from support.logs import event
from support.toys import toy_backend

pytestmark = pytest.mark.contract("I4")


@functools.cache
def database() -> duckdb.DuckDBPyConnection:
    return duckdb.connect(config={"threads": 1})


def checked(events: Sequence[Event]) -> list[IdentityCheck]:
    database().register("events", to_arrow(EVENTS, list(events)))
    return check_identities(lambda query: database().execute(query).fetchall())


def broken(events: Sequence[Event]) -> dict[str, list[tuple[int, str]]]:
    """By identity: seq and text of the rows that break it."""
    checks = checked(events)
    return {c.name: [(seq, what) for _, _, seq, what in c.broken] for c in checks if c.broken}


def make(
    policy: str, *, cold: int = 32, evict_by: str = "native", defer: bool = False
) -> tuple[Session, ToyBackend, ListSink]:
    toy, sink = toy_backend(n_ctx=48, chunk=8, cold_budget_tokens=cold), ListSink()
    session = Session(
        toy,
        parse_policy(policy),
        sink,
        ManualClock(),
        run_id="r",
        session_id="s",
        evict_by=evict_by,
        defer_prefill=defer,
    )
    return session, toy, sink


POLICIES = (
    "none",
    "none:hole=refill,block=4",
    "stream:sink=2,recent=9,block=4",
    "stream:sink=3,recent=7,hole=refill,block=4",
    "class:budget=24,block=4",
)
TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=50)
STEP = st.one_of(
    st.tuples(st.just("turn"), st.integers(0, 60), TOKENS),
    st.tuples(st.just("suffix"), st.integers(-1, 3), TOKENS),
    st.tuples(st.just("decode"), st.integers(1, 40), st.none()),
    st.tuples(st.just("evict"), st.integers(0, 40), st.none()),
    st.tuples(st.just("again"), st.booleans(), st.none()),
    st.tuples(st.just("snapshot"), st.integers(0, 1), st.none()),
    st.tuples(st.just("fault"), st.sampled_from(["prefill", "decode"]), st.none()),
)


@given(st.sampled_from(POLICIES), st.booleans(), st.booleans(), st.lists(STEP, max_size=12))
@settings(max_examples=60, deadline=None)
def test_any_session_adds_up(policy: str, recompute: bool, defer: bool, steps: list[tuple[str, Any, Any]]) -> None:
    """Cancelled, refused and failed operations included."""
    session, toy, sink = make(policy, evict_by="recompute" if recompute else "native", defer=defer)
    for kind, a, tokens in steps:
        with contextlib.suppress(KvtapeError, PlanError):
            take(session, toy, kind, a, tokens)
    session.close()
    assert broken(sink.events) == {}
    assert deferral_findings(sink.events) == []


def take(session: Session, toy: ToyBackend, kind: str, a: Any, tokens: Any) -> None:
    if kind == "turn":
        session.ensure_prefix([*session.tape[:a], *tokens])
    elif kind == "suffix":
        toy.cancel_after = a if a >= 0 else None
        try:
            session.prefill_suffix(tokens)
        finally:
            toy.cancel_after = None
    elif kind == "decode":
        session.decode(a)
    elif kind == "evict":
        session.evict(a, a + 3)
    elif kind == "again":
        session.ensure_prefix(session.tape, need_logits=a)
    elif kind == "snapshot":
        session.restore(session.snapshot())
    else:
        toy.faults = {a}


def whole_session(*, defer: bool = False, drafts: bool = False) -> list[Event]:
    """One that has a row for every identity, of sessions that defer, that speculate, or of the others."""
    session, _, sink = make("none:hole=refill,block=4", cold=0, defer=defer)
    session._parts.drafter = Wild() if drafts else None
    session.ensure_prefix(list(range(20)))
    session.decode(3)
    session.evict(4, 8)
    session.ensure_prefix([*range(18), 40, 41])
    session.prefill_suffix([50, 51, 52])
    session.decode(2)
    session.close()
    return sink.events


def forged(events: list[Event], op: Op, needs: str, **columns: Any) -> tuple[list[Event], int]:
    """The first row of `op` that has the counter `needs`, changed."""
    i = next(i for i, e in enumerate(events) if e.op is op and getattr(e, needs) is not None)
    return [*events[:i], dataclasses.replace(events[i], **columns), *events[i + 1 :]], events[i].seq


class Wild(PromptLookup):
    """Proposes always."""

    def draft(self, tape: Sequence[int], at_most: int) -> Sequence[int]:
        return [1, 2]


OF_DEFERRAL = ("waiting", "folded")
OF_SPECULATION = ("drafts",)
FORGERIES: dict[str, tuple[Op, str, dict[str, Any]]] = {
    "prefix": (Op.PREFILL, "reused", {"reused": 7}),
    "dropped": (Op.PREFILL, "reused", {"dropped": 5}),
    "suffix": (Op.PREFILL, "suffix", {"suffix": 4}),
    "sums": (Op.PREFILL, "reused", {"prefilled": 19, "forgotten": 1}),
    "waiting": (Op.PROMPT, "suffix", {"suffix": 4, "prompt_tokens": 4}),
    "folded": (Op.PREFILL, "deferred_prefill_tokens", {"deferred_prefill_tokens": 1}),
    "prefill": (Op.PREFILL, "reused", {"physical_prefill_tokens": 1}),
    "decode": (Op.DECODE, "completion_tokens", {"decode_calls": 99}),
    "drafts": (Op.DECODE, "drafted_tokens", {"rejected_tokens": 9}),
    "asked": (Op.GENERATE, "n_tokens", {"n_tokens": 1}),
    "recomputed": (Op.RECOMPUTE, "recomputed_tokens", {"recomputed_tokens": 3}),
    "source": (Op.DECODE, "completion_tokens", {"token_count_source": None}),
}


@pytest.mark.parametrize("name", [identity.name for identity in IDENTITIES])
def test_each_identity_finds_its_forgery_and_names_the_row(name: str) -> None:
    events = whole_session(defer=name in OF_DEFERRAL, drafts=name in OF_SPECULATION)
    assert broken(events) == {}
    op, needs, columns = FORGERIES[name]
    changed, seq = forged(events, op, needs, **columns)
    if name == "waiting":  # what was offered shows to be another number where it is generated from
        seq = next(e.seq for e in events if e.op is Op.GENERATE and e.seq > seq)
    found = broken(changed)
    assert seq in [row for row, _ in found[name]], found


def test_a_source_that_says_little_claims_little() -> None:
    """As importers write it: a prompt that bears its turn's counters itself, blocks that nobody counted."""
    rows = [
        event(0, Op.PROMPT, reused=0, prefilled=50, dropped=0, prompt_tokens=50, n_tokens=50),
        event(1, Op.RECOMPUTE, start=0, stop=16, n_tokens=16, recomputed_tokens=0),
        event(2, Op.GENERATE, n_tokens=9),
        event(3, Op.DECODE, start=50, stop=59, n_tokens=9),
        event(4, Op.CLOSE),
    ]
    assert broken(rows) == {}


def test_every_identity_was_held_against_a_row() -> None:
    rows = {c.name: c.rows for c in checked(whole_session())}
    assert all(n for name, n in rows.items() if name not in (*OF_DEFERRAL, *OF_SPECULATION)), rows
    rows = {c.name: c.rows for c in checked(whole_session(defer=True))}
    assert all(rows[name] for name in OF_DEFERRAL), rows
    assert all(c.rows for c in checked(whole_session(drafts=True)) if c.name in OF_SPECULATION)


@pytest.mark.contract("I7")
@pytest.mark.parametrize(
    "columns",
    [
        {"accepted_tokens": 2, "rejected_tokens": 0},
        {"accepted_tokens": None},
        {"decode_calls": 0},
        {"drafted_tokens": 1},
    ],
)
def test_drafts_that_do_not_add_up_are_found(columns: dict[str, Any]) -> None:
    events = whole_session(drafts=True)
    assert broken(events) == {}
    changed, seq = forged(events, Op.DECODE, "drafted_tokens", **columns)
    assert seq in [row for row, _ in broken(changed)["drafts"]]


def test_a_backend_that_cannot_count_is_labelled() -> None:
    session, toy, sink = make("none")
    for name in ("prefill", "decode_until"):
        setattr(toy, name, uncounted(getattr(toy, name)))
    session.ensure_prefix([1, 2, 3])
    session.decode(2)
    session.close()
    counted = [e.token_count_source for e in sink.events if e.op in (Op.PREFILL, Op.DECODE)]
    assert counted == ["fallback", "fallback"]
    assert broken(sink.events) == {}


def uncounted(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: dataclasses.replace(call(*args), counted=False)
