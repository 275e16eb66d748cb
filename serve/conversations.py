"""Which slot a prompt goes to: the session that has most of it already, unless that would mix two conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtape.backends.prefix import common_prefix
from kvtape.planner.ranges import RangeSet

__all__ = ["Choice", "Seat", "choose_seat"]


@dataclass(frozen=True, slots=True)
class Seat:
    """A slot as it is now.

    `busy`: a turn runs on it. `tape` None: it has no session. `asked`: how long the last prompt was, tokens.
    `resident`: of the tape. `last_used`: a counter of turns. `name`: the client's own name of the conversation.
    """

    slot: int
    busy: bool
    tape: tuple[int, ...] | None = None
    asked: int = 0
    resident: RangeSet = field(default_factory=RangeSet)
    last_used: int = 0
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """`fresh`: what the slot holds is another conversation's; close it and begin a session anew."""

    slot: int
    fresh: bool


def choose_seat(
    seats: Sequence[Seat], tokens: Sequence[int], name: str | None, *, may_branch: bool = True
) -> Choice | None:
    """The slot for a prompt; None: wait, every slot is busy or the named conversation is in the middle of a turn.

    A named conversation has its own session as long as nobody needed the slot. Without a name the session with the
    longest common prefix goes on, if the prompt continues it: the whole last prompt is shared. One that shares less
    branches off, into an empty slot where the session would lose more than it shares, else into the slot that has
    waited longest. It keeps what it shares only where nothing of that was evicted, since rows behind a hole have seen
    tokens that the branch has not, and only with `may_branch`: false for policies that rank by attention, which
    remember what the other conversation looked at.
    """
    if name is not None:
        own = next((s for s in seats if s.name == name), None)
        if own is not None:
            return None if own.busy else Choice(own.slot, fresh=own.tape is None)
    free = [s for s in seats if not s.busy]
    if not free:
        return None
    shared = {s.slot: common_prefix(s.tape, tokens) for s in free if s.tape}
    if name is None:
        for seat in sorted(free, key=lambda s: (-shared.get(s.slot, 0), s.slot)):
            n = shared.get(seat.slot, 0)
            if seat.name is None and n and (n >= seat.asked or (may_branch and _worth_it(seat, n))):
                return Choice(seat.slot, fresh=False)
    empty = [s for s in free if s.tape is None]
    if empty:
        return Choice(min(s.slot for s in empty), fresh=True)
    oldest = min(free, key=lambda s: (s.last_used, s.slot))
    return Choice(oldest.slot, fresh=not (may_branch and _is_whole(oldest, shared.get(oldest.slot, 0))))


def _worth_it(seat: Seat, shared: int) -> bool:
    assert seat.tape is not None
    return 2 * shared >= len(seat.tape) and _is_whole(seat, shared)


def _is_whole(seat: Seat, shared: int) -> bool:
    return shared > 0 and RangeSet([(0, shared)]).issubset(seat.resident)
