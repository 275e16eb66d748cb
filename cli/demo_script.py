"""What the demo does with its two sessions: every kind of event that this version writes occurs in them.

The essay session streams a text that is three times as long as the context, looks things up in the cold store,
steps back to a snapshot, answers a question, answers the question that the user meant instead, and ends with a
stretch whose positions are kept contiguous. The notes session is small: its holes are filled again, and it dies of
a decode that the engine really fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvtape.backends.errors import SessionFatal, UnknownBlock
from kvtape.backends.session import Session
from kvtape.planner.events import Placement
from kvtape.planner.specs import parse_policy

__all__ = ["CHUNK", "ESSAY", "NOTES", "Material", "SessionPlan", "play_essay", "play_notes"]

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """How one session of the demo is opened; sizes in tokens."""

    session_id: str
    policy: str
    n_ctx: int
    cold_budget_tokens: int


ESSAY = SessionPlan("essay", "stream:sink=4,recent=508", n_ctx=1024, cold_budget_tokens=1024)
NOTES = SessionPlan("notes", "class:budget=480", n_ctx=512, cold_budget_tokens=64)

CHUNK = 512
"""Tokens in one prefill call."""

_BEHIND_THE_PLAN = 29
_NO_SUCH_BLOCK = 2**32
_SNAPSHOT_SIDE_TRIP = 24
_REBASED_TOKENS = 700


@dataclass(frozen=True, slots=True)
class Material:
    """Token ids: the essay, a question about it, and the question that was meant."""

    essay: Sequence[int]
    question: Sequence[int]
    meant: Sequence[int]


def play_essay(session: Session, material: Material, tell: Tell) -> tuple[int, ...]:
    """The long session, to its close. Returns the tokens of the last answer."""
    essay = list(material.essay)
    first = _first_part(len(essay))
    tell(f"the first {first} tokens of the essay stream through {ESSAY.n_ctx} rows of cache")
    session.ensure_prefix(essay[:first])
    session.decode(40)

    cold = session.cold_block_ids
    tell(f"three blocks come back from the cold store ({len(cold)} are there)")
    for block_id in cold[:2]:
        session.admit(block_id, Placement.IN_PLACE)
    session.admit(cold[-1], Placement.APPEND)
    session.decode(16)

    tell("a snapshot, a side trip, and back")
    snapshot = session.snapshot()
    session.decode(_SNAPSHOT_SIDE_TRIP)
    last = session.resident.ranges[-1]
    session.evict(last.start, last.start + len(last) // 2)
    session.restore(snapshot)

    tell(f"the rest of the essay, {len(essay) - first} tokens")
    session.prefill_suffix(essay[first:])
    session.decode(32)

    tell("a question, then the question that was meant: the prompts diverge")
    so_far = list(session.tape)
    session.ensure_prefix([*so_far, *material.question])
    session.decode(40)
    session.ensure_prefix([*so_far, *material.meant])
    answer = session.decode(40)

    tell("a block that does not exist is refused")
    with suppress(UnknownBlock):
        session.admit(_NO_SUCH_BLOCK)

    tell("the holes are closed, and from here on positions are kept contiguous")
    session.set_policy(parse_policy(f"{ESSAY.policy},positions=rebased"))
    session.compact()
    session.prefill_suffix(essay[:_REBASED_TOKENS])
    session.decode(24)
    session.close()
    return answer.tokens


def _first_part(essay_tokens: int) -> int:
    """About three quarters, cut a little behind a plan, so that there is room for what comes back from the cold."""
    plans = (essay_tokens * 3 // 4 - ESSAY.n_ctx) // CHUNK
    return ESSAY.n_ctx + plans * CHUNK + _BEHIND_THE_PLAN


def play_notes(session: Session, material: Material, fail_next: Callable[[], None], tell: Tell) -> str:
    """The small session. `fail_next` arms the engine's own abort; returns the class of the fatal that follows."""
    tell("a small session evicts twice; its cold store holds only one of the two")
    session.ensure_prefix(list(material.essay[:256]))
    session.decode(16)
    session.evict(32, 96)
    session.evict(128, 192)
    tell("the next prompt fills both holes: one from the cold store, one computed again")
    session.ensure_prefix([*session.tape, *material.question])
    session.decode(16)
    tell("the engine aborts the next decode: the session is poisoned for good")
    fail_next()
    try:
        session.decode(8)
    except SessionFatal as fatal:
        return str(fatal.fatal_class)
    finally:
        session.close()
    raise AssertionError("the armed abort did not fire")
