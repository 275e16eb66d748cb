"""The cold store of a session: budgets, what a block must still be when it comes back, and when it is worth nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.cold_store import ColdEntry
from kvtape.backends.errors import SessionFatal, StateRejected, UnknownBlock
from kvtape.backends.session import Session
from kvtape.planner.blocks import Flag
from kvtape.planner.events import Op, Placement
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink
from kvtape.testing.toy import ToyBackend
from support.toys import toy_backend


def make(policy: str = "none:block=4,hole=forget", **backend: int) -> tuple[Session, ToyBackend, ListSink]:
    toy = toy_backend(**{"n_ctx": 64, "chunk": 64, "cold_budget_tokens": 32} | backend)  # type: ignore[arg-type]
    sink = ListSink()
    session = Session(toy, parse_policy(policy), sink, ManualClock(), run_id="r", session_id="s")
    session.ensure_prefix(list(range(40)))
    return session, toy, sink


def store_of(session: Session) -> dict[int, ColdEntry]:
    cold = session._parts.cold
    assert cold is not None
    return cold._entries


def block_bytes() -> int:
    session, _, _ = make()
    session.evict(4, 8)
    (entry,) = store_of(session).values()
    return len(entry.blob)


def test_the_bytes_have_a_budget_of_their_own() -> None:
    size = block_bytes()
    session, _, sink = make(cold_budget_bytes=2 * size + size // 2)
    for start in (4, 12, 20):
        session.evict(start, start + 4)
    assert [(e.op, e.start, e.reason) for e in sink.events if e.op is Op.TRIM] == [(Op.TRIM, 4, "cold_budget")]
    assert session.explain().cold_bytes <= 2 * size + size // 2
    (row,) = sink.sessions
    assert (row.cold_budget_tokens, row.cold_budget_bytes) == (32, 2 * size + size // 2)


def test_a_block_of_more_bytes_than_the_whole_budget_is_refused_with_an_event() -> None:
    session, _, sink = make(cold_budget_bytes=block_bytes() - 1)
    session.evict(4, 8)
    assert [e.error_class for e in sink.events if e.op is Op.REFUSE] == ["ColdStoreTooSmall"]
    assert session.cold_block_ids == ()
    assert (4, 8) in session.explain().dropped


def test_blocks_that_left_in_one_run_are_inserted_one_by_one() -> None:
    """Four blocks in a budget of two: the first two make room for the last two."""
    session, _, sink = make(cold_budget_tokens=8)
    session.evict(4, 20)
    assert [e.start for e in sink.events if e.op is Op.TRIM] == [4, 8]
    assert [e.start for e in store_of(session).values()] == [12, 16]


DAMAGE: dict[str, Callable[[ColdEntry], ColdEntry]] = {
    "state_hash": lambda e: dataclasses.replace(e, blob=e.blob[:-1] + bytes([e.blob[-1] ^ 1])),
    "n_bytes": lambda e: dataclasses.replace(e, blob=e.blob[:-9]),
    "tokens_hash": lambda e: dataclasses.replace(e, start=e.start + 4, stop=e.stop + 4),
    "n_tokens": lambda e: dataclasses.replace(e, stop=e.stop + 1),
    "kv_types": lambda e: dataclasses.replace(e, identity=dataclasses.replace(e.identity, kv_types="q8_0/q8_0")),
    "model": lambda e: dataclasses.replace(e, identity=dataclasses.replace(e.identity, model="another")),
    "layout": lambda e: dataclasses.replace(e, identity=dataclasses.replace(e.identity, layout="toy 0")),
}


@pytest.mark.parametrize("what", sorted(DAMAGE))
def test_a_block_that_is_not_what_left_never_reaches_the_engine(what: str) -> None:
    session, toy, sink = make()
    session.evict(4, 8)
    (block_id,) = session.cold_block_ids
    store_of(session)[block_id] = DAMAGE[what](store_of(session)[block_id])
    rows, calls = toy.rows, list(toy.operations)
    with pytest.raises(StateRejected, match=f"cold block {block_id}: {what} is"):
        session.admit(block_id)
    assert (toy.rows, toy.operations) == (rows, calls)
    assert (sink.events[-1].op, sink.events[-1].error_class) == (Op.REFUSE, "StateRejected")


@pytest.mark.parametrize(("can_refill", "ops"), [(True, ["recompute"]), (False, ["truncate"])])
def test_a_hole_whose_block_is_damaged_is_filled_another_way_and_the_log_says_so(
    can_refill: bool, ops: list[str]
) -> None:
    session, toy, sink = make("none:block=4,hole=refill")
    toy.capabilities = dataclasses.replace(toy.capabilities, recompute_range=can_refill)
    session.evict(4, 8)
    (block_id,) = session.cold_block_ids
    store_of(session)[block_id] = DAMAGE["state_hash"](store_of(session)[block_id])
    n = len(sink.events)
    status = session.ensure_prefix([*range(40), 7])
    assert status.reused + status.forgotten + status.prefilled == 41
    told = [str(e.op) for e in sink.events[n:]]
    assert told[:2] == ["refuse", "trim"]
    assert [op for op in told if op in ("admit", "recompute", "truncate")] == ops
    assert session.resident.as_pairs() == [(0, 41)]


def test_a_block_that_came_back_is_flagged_until_it_leaves_again() -> None:
    session, _, _ = make()
    session.evict(4, 8)
    session.admit(session.cold_block_ids[0], Placement.IN_PLACE)

    def flagged() -> list[int]:
        return [b.start for b in session._parts.catalog.blocks() if b.flags & Flag.RETRIEVED]

    assert flagged() == [4]
    session.decode(2)
    session.evict(4, 8)
    assert flagged() == []


@pytest.mark.parametrize("end", ["close", "fatal"])
def test_the_store_is_empty_once_the_session_ended(end: str) -> None:
    session, toy, _ = make()
    session.evict(4, 8)
    assert len(session.cold_block_ids) == 1
    if end == "fatal":
        toy.faults = {"decode"}
        with pytest.raises(SessionFatal):
            session.decode(1)
    session.close()
    assert session.explain().cold_bytes == 0
    assert store_of(session) == {}


def test_a_truncation_drops_the_blocks_past_the_cut_and_keeps_those_before() -> None:
    session, _, _ = make()
    for start in (4, 20):
        session.evict(start, start + 4)
    first, second = session.cold_block_ids
    session.ensure_prefix([*range(16), 50, 51, 52, 53])
    assert session.cold_block_ids == (first,)
    assert list(store_of(session)) == [first]
    with pytest.raises(UnknownBlock):
        session.admit(second)
