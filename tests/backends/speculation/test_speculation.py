"""Speculation changes how a decode runs and nothing that comes of it: tokens, events, rows in the engine's memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import Cancelled, ChoiceFailed, InputRejected, SessionFatal, UnsupportedOperation
from kvtape.backends.protocol import Backend, Logits, SessionConfig
from kvtape.backends.session import Session
from kvtape.backends.speculation.draft_model import DraftModel
from kvtape.backends.speculation.drafter import Drafter, DraftFailed
from kvtape.backends.speculation.lookup import PromptLookup
from kvtape.backends.speculation.spec import Speculation
from kvtape.planner.events import Event, Op
from kvtape.planner.layout import Layout
from kvtape.planner.residency import fold
from kvtape.planner.specs import parse_policy
from kvtape.testing.bench import KeyReference
from kvtape.testing.sink import ListSink
from kvtape.testing.toy import ToyBackend, open_toy
from support import conformance_backends, llama_tiny

pytestmark = pytest.mark.contract("I7")

CONFIG = SessionConfig(n_ctx=64, chunk=16, kv_type_k="f32", kv_type_v="f32", cold_budget_tokens=64)
BACKENDS: dict[str, Callable[[SessionConfig], Backend]] = {
    "toy": open_toy,
    "reference": conformance_backends.reference,
    "openvino": conformance_backends.openvino,
    "llama": lambda c: llama_tiny.engine(weights="q8_0").open(
        dataclasses.replace(c, flash_attention="on", uncertified=True)
    ),
}
POLICIES = ("none", "stream:sink=4,recent=12", "stream:sink=2,recent=20,every=5", "class:budget=24")
CHANGED = {"at_ns", "elapsed_ns", "decode_calls", "drafted_tokens", "accepted_tokens", "rejected_tokens", "detail"}


class Told:
    """Proposes what it is told to: `right` of the true continuation, then `wrong` of other tokens."""

    spec = "told"

    def __init__(self, tape: Sequence[int], shape: Sequence[tuple[int, int]]) -> None:
        self._true, self._shape, self._calls = list(tape), list(shape), 0
        self.asked: list[int] = []
        self.closed = 0

    def draft(self, tape: Sequence[int], at_most: int) -> Sequence[int]:
        self.asked.append(at_most)
        right, wrong = self._shape[self._calls % len(self._shape)]
        self._calls += 1
        true = self._true[len(tape) : len(tape) + right + wrong]
        return [t if i < right else 3 + (t + 1) % 50 for i, t in enumerate(true)]

    def close(self) -> None:
        self.closed += 1


@dataclasses.dataclass(frozen=True)
class Played:
    tape: tuple[int, ...]
    stopped: tuple[str, ...]
    events: list[Event]
    layout: Layout
    rows: dict[int, tuple[int, bytes]]
    logits: Logits
    counters: dict[str, int]


def play(
    backend: Backend, policy: str, turns: Sequence[tuple[int, int]], drafter: Drafter | None, **decode: Any
) -> Played:
    """Turns of (prompt tokens, tokens to generate) on one session; what is left of it."""
    sink, stopped = ListSink(), []
    session = Session(
        backend,
        parse_policy(policy),
        sink,
        ManualClock(),
        run_id="r",
        session_id="s",
        speculation=None if drafter is None else Speculation(drafter.spec, lambda _: drafter),
    )
    with session:
        for turn, (n_prompt, n) in enumerate(turns):
            words = np.random.default_rng(turn).integers(3, 40, n_prompt).tolist()
            session.ensure_prefix([*session.tape, *words])
            stopped.append(session.decode(n, **decode).stopped)
        seen = backend.witness()
        books = {s.cache_start + i: s.tape_start + i for s in backend.books() for i in range(s.length)}
        rows = {
            books[int(p)]: (int(p), b"".join(k[i].tobytes() for k in seen.rows.keys))
            for i, p in enumerate(seen.cache_positions)
        }
        logits = session.logits
        assert logits is not None
        assert fold(sink.events).layout == backend.books(), "books and fold"
        counters = session.explain().counters
        return Played(session.tape, tuple(stopped), list(sink.events), backend.books(), rows, logits, counters)


def same(plain: Played, drafted: Played, *, exact: bool) -> None:
    assert drafted.tape == plain.tape
    assert drafted.stopped == plain.stopped
    assert [told(e) for e in drafted.events] == [told(e) for e in plain.events]
    assert drafted.layout == plain.layout
    assert drafted.rows.keys() == plain.rows.keys()
    if exact:
        assert drafted.rows == plain.rows
        np.testing.assert_array_equal(drafted.logits, plain.logits)
    else:
        np.testing.assert_allclose(drafted.logits, plain.logits, atol=1e-3)


def told(event: Event) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(event).items() if k not in CHANGED}


def counters_add_up(played: Played) -> None:
    for event in played.events:
        drafted = (event.drafted_tokens, event.accepted_tokens, event.rejected_tokens)
        if event.op is not Op.DECODE or drafted == (None, None, None):
            assert drafted == (None, None, None)
            continue
        assert all(n is not None for n in drafted)
        assert event.drafted_tokens == (event.accepted_tokens or 0) + (event.rejected_tokens or 0) > 0
        assert (event.accepted_tokens or 0) < (event.n_tokens or 0)
        assert (event.n_tokens or 0) <= (event.accepted_tokens or 0) + (event.decode_calls or 0)
    for name in ("drafted_tokens", "accepted_tokens", "rejected_tokens"):
        assert played.counters[name] == sum(getattr(e, name) or 0 for e in played.events)


shapes = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=4)
turns_of = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 45)), min_size=1, max_size=2)


@settings(max_examples=40, deadline=None)
@given(shape=shapes, turns=turns_of, policy=st.sampled_from(POLICIES[1:]))
def test_whatever_is_proposed_the_toy_generates_the_same(
    shape: list[tuple[int, int]], turns: list[tuple[int, int]], policy: str
) -> None:
    plain = play(open_toy(CONFIG), policy, turns, None)
    drafted = play(open_toy(CONFIG), policy, turns, Told(plain.tape, shape))
    same(plain, drafted, exact=True)
    counters_add_up(drafted)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", [[(15, 0)], [(0, 15)], [(3, 2), (0, 0), (1, 0)]], ids=["right", "wrong", "mixed"])
def test_every_engine_generates_the_same_and_keeps_the_same_rows(name: str, shape: list[tuple[int, int]]) -> None:
    turns = [(9, 20), (5, 30)]
    open_backend = BACKENDS[name]
    one = open_backend(CONFIG)
    exact = one.verify_margin == 0  # type: ignore[attr-defined]
    plain = play(one, POLICIES[1], turns, None)
    drafted = play(open_backend(CONFIG), POLICIES[1], turns, Told(plain.tape, shape))
    same(plain, drafted, exact=exact)
    counters_add_up(drafted)
    assert drafted.counters["drafted_tokens"] > 0
    assert (drafted.counters["accepted_tokens"] > 0) == (shape != [(0, 15)])
    if shape == [(15, 0)]:
        assert drafted.counters["decode_calls"] < plain.counters["decode_calls"] / 3


@pytest.mark.parametrize("name", BACKENDS)
def test_lookup_on_every_engine(name: str) -> None:
    open_backend = BACKENDS[name]
    plain = play(open_backend(CONFIG), "none", [(6, 40)], None)
    drafted = play(open_backend(CONFIG), "none", [(6, 40)], PromptLookup())
    same(plain, drafted, exact=name != "openvino")
    counters_add_up(drafted)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_draft_model_that_is_the_model_is_right_and_another_is_not(name: str) -> None:
    open_backend = BACKENDS[name]
    plain = play(open_backend(CONFIG), "stream:sink=4,recent=20", [(9, 12), (4, 30)], None)
    itself = DraftModel(open_backend(dataclasses.replace(CONFIG, n_ctx=128)), name="itself")
    drafted = play(open_backend(CONFIG), "stream:sink=4,recent=20", [(9, 12), (4, 30)], itself)
    same(plain, drafted, exact=name != "openvino")
    assert drafted.events[0].detail == '{"speculation": "draft:model=itself,tokens=4"}' or name == "llama"
    assert drafted.counters["accepted_tokens"] > 0
    if name != "toy":  # of another vocabulary
        other = DraftModel(llama_tiny.engine(seed=3).open(CONFIG), name="other", tokens=3)
        drafted = play(open_backend(CONFIG), "stream:sink=4,recent=20", [(9, 12), (4, 30)], other)
        same(plain, drafted, exact=name != "openvino")
        assert drafted.counters["drafted_tokens"] > 0


def test_end_tokens_inside_a_draft_end_the_run_there() -> None:
    free = play(open_toy(CONFIG), "none", [(6, 30)], None)
    said = free.tape[6:]
    for end in (said[0], said[3], said[11]):
        plain = play(open_toy(CONFIG), "none", [(6, 30)], None, stop_tokens=frozenset({end}))
        drafted = play(open_toy(CONFIG), "none", [(6, 30)], Told(free.tape, [(9, 0)]), stop_tokens=frozenset({end}))
        same(plain, drafted, exact=True)
        assert drafted.stopped == ("end_token",)


def test_a_choice_of_ones_own_is_asked_once_for_each_token_in_order() -> None:
    def chooser(seen: list[bytes]) -> Callable[[Logits], int]:
        rng = np.random.default_rng(7)

        def choose(logits: Logits) -> int:
            seen.append(logits.tobytes())
            weights = np.exp(logits - logits.max())
            return int(rng.choice(len(logits), p=weights / weights.sum()))

        return choose

    seen: tuple[list[bytes], list[bytes]] = ([], [])
    plain = play(open_toy(CONFIG), "none", [(6, 40)], None, choose=chooser(seen[0]))
    drafted = play(open_toy(CONFIG), "none", [(6, 40)], Told(plain.tape, [(4, 2)]), choose=chooser(seen[1]))
    same(plain, drafted, exact=True)
    assert seen[0] == seen[1]
    assert drafted.counters["accepted_tokens"] > 0


def test_on_an_engine_that_is_not_exact_a_choice_of_ones_own_is_decoded_plainly() -> None:
    drafter = Told(range(3, 200), [(5, 0)])
    played = play(
        conformance_backends.openvino(CONFIG), "none", [(6, 10)], drafter, choose=lambda x: 3 + int(x.argmax()) % 9
    )
    assert drafter.asked == []
    assert played.counters["drafted_tokens"] == 0


class Near(ToyBackend):
    """A toy whose verifying call gives other logits where the best two are near, as an engine of other kernels does."""

    verify_margin = 0.05

    def verify(self, tokens, tape_start, keep):  # type: ignore[no-untyped-def]
        def bent(each: Logits) -> int:
            each = each.copy()
            for row in each:
                best = np.argsort(row)[-2:]
                if row[best[1]] - row[best[0]] < 0.02:
                    row[best[0]] += 0.02
            return int(keep(each))

        return super().verify(tokens, tape_start, bent)


@settings(max_examples=20, deadline=None)
@given(shape=shapes, seed=st.integers(0, 5))
def test_choices_that_are_near_are_made_by_a_call_of_their_own(shape: list[tuple[int, int]], seed: int) -> None:
    turns = [(5 + seed, 40)]
    plain = play(open_toy(CONFIG), "none", turns, None)
    near = Near(CONFIG, open_toy(CONFIG).capabilities)
    drafted = play(near, "none", turns, Told(plain.tape, shape))
    same(plain, drafted, exact=True)
    counters_add_up(drafted)


# -- refusals, failures ----------------------------------------------------------------------------------------------


def opened(backend: Backend, drafter: Drafter) -> tuple[Session, ListSink]:
    sink = ListSink()
    session = Session(
        backend,
        parse_policy("none"),
        sink,
        ManualClock(),
        run_id="r",
        session_id="s",
        speculation=Speculation(drafter.spec, lambda _: drafter),
    )
    session.ensure_prefix([5, 6, 7, 8])
    return session, sink


def test_where_drafts_cannot_be_taken_back_the_session_does_not_open() -> None:
    scored = open_toy(dataclasses.replace(CONFIG, options={"scores": "on"}))
    stuck = ToyBackend(CONFIG, dataclasses.replace(open_toy(CONFIG).capabilities, remove_tail=False))
    for backend, why in ((scored, "scores=on"), (stuck, "remove_tail is false")):
        with pytest.raises(UnsupportedOperation, match=why):
            opened(backend, PromptLookup())


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_cancel_between_two_calls_takes_everything_back(calls: int) -> None:
    backend = open_toy(CONFIG)

    class Cancelling(Told):
        def draft(self, tape: Sequence[int], at_most: int) -> Sequence[int]:
            if len(self.asked) == calls:
                backend.cancel()
            return super().draft(tape, at_most)

    session, sink = opened(backend, Cancelling([3] * 60, [(2, 1)]))
    before = backend.books(), session.tape
    with pytest.raises(Cancelled):
        session.decode(20)
    assert (backend.books(), session.tape) == before
    assert fold(sink.events).layout == backend.books()
    assert len(session.decode(20).tokens) == 20


def test_a_choice_that_raises_in_the_middle_of_a_draft_takes_everything_back() -> None:
    plain = play(open_toy(CONFIG), "none", [(4, 20)], None)
    for at in (0, 3, 7):
        backend, asked = open_toy(CONFIG), []

        def choose(logits: Logits, at: int = at, asked: list[int] = asked) -> int:  # type: ignore[assignment]
            asked.append(1)
            if len(asked) > at:
                raise KeyError("no")
            return int(logits.argmax())

        session, sink = opened(backend, Told(plain.tape, [(2, 1)]))
        before = backend.books()
        with pytest.raises(ChoiceFailed):
            session.decode(20, choose=choose)
        assert backend.books() == before == fold(sink.events).layout


def test_a_fault_in_a_verifying_call_is_final() -> None:
    backend = open_toy(CONFIG)
    drafter = Told([3] * 60, [(2, 1)])
    session, sink = opened(backend, drafter)
    backend.faults.add("verify")
    with pytest.raises(SessionFatal, match="decode_failed"):
        session.decode(20)
    assert sink.events[-1].op is Op.FATAL
    assert drafter.closed == 1
    with pytest.raises(SessionFatal):
        session.decode(1)


def test_a_drafter_that_fails_or_says_what_is_no_token_is_refused_and_nothing_changed() -> None:
    class Broken(Told):
        def draft(self, tape: Sequence[int], at_most: int) -> Sequence[int]:
            raise DraftFailed("gone")

    class Odd(Told):
        def draft(self, tape: Sequence[int], at_most: int) -> Sequence[int]:
            return [10**6]

    for drafter, error in ((Broken([], [(1, 1)]), DraftFailed), (Odd([], [(1, 1)]), InputRejected)):
        backend = open_toy(CONFIG)
        session, sink = opened(backend, drafter)
        before = backend.books()
        with pytest.raises(error):
            session.decode(20)
        assert sink.events[-1].op is Op.REFUSE
        assert backend.books() == before
        session.close()


def test_a_draft_engine_that_fails_is_not_the_sessions_failure() -> None:
    draft = open_toy(CONFIG)
    session, _ = opened(open_toy(CONFIG), DraftModel(draft, name="d"))
    draft.faults.add("prefill")
    with pytest.raises(DraftFailed, match="the draft model cannot go on"):
        session.decode(5)
    assert session.fatal is None


@pytest.mark.parametrize("name", BACKENDS)
def test_the_engines_own_rows_are_those_of_the_tape_after_every_decode(name: str) -> None:
    """Identity, not only counts: each row's layer-0 key is that of its token at its place."""
    plain = play(BACKENDS[name](CONFIG), "none", [(9, 40)], None)
    backend, reference = BACKENDS[name](CONFIG), KeyReference(BACKENDS[name])
    session, _ = opened(backend, Told([*range(5, 9), *plain.tape], [(3, 3), (0, 2)]))
    for _ in range(3):
        session.decode(7)
        seen = backend.witness()
        places = {s.cache_start + i: session.tape[s.tape_start + i] for s in backend.books() for i in range(s.length)}
        found = seen.cache_positions.tolist()
        assert sorted(found) == sorted(places)
        expected = reference.keys(CONFIG, [(places[p], p) for p in found])
        np.testing.assert_allclose(seen.rows.keys[0].astype(np.float64), expected, atol=1e-4)
    assert session.explain().counters["rejected_tokens"] > 0
    session.close()
