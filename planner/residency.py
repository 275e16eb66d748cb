"""The residency fold: `apply(state, event) -> state`, the only source of what kvtape says about residency.

The fold is pure and strict: an event that is illegal in a state raises `IllegalEvent` and nothing is repaired.
`check_event` compares what an event recorded about the state with what the fold says.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtape.planner import layout as lay
from kvtape.planner.events import Event, Op
from kvtape.planner.residency_rules import RULES, IllegalEvent, require
from kvtape.planner.residency_state import ColdBlock, ResidencyState, changed

__all__ = [
    "RESIDENCY_OPS",
    "ColdBlock",
    "IllegalEvent",
    "ResidencyMismatch",
    "ResidencyState",
    "apply",
    "check_event",
    "fold",
]


RESIDENCY_OPS = frozenset({Op.TRUNCATE, Op.PREFILL, Op.DECODE, Op.EVICT, Op.ADMIT, Op.SHIFT, Op.RECOMPUTE, Op.RESTORE})
"""The events that change the resident set or its positions."""


class ResidencyMismatch(ValueError):
    """The event recorded another residency than the fold of the log gives."""

    def __init__(self, event: Event, what: str, recorded: int, folded: int) -> None:
        super().__init__(
            f"session {event.session_id} seq {event.seq} ({event.op}): {what} recorded {recorded}, fold gives {folded}"
        )
        self.event = event
        self.what = what
        self.recorded = recorded
        self.folded = folded


def apply(state: ResidencyState, event: Event) -> ResidencyState:
    """The state after `event`. Raises IllegalEvent; never looks at the recorded digests (see `check_event`)."""
    require(event, event.seq == state.next_seq, f"expected seq {state.next_seq}")
    require(event, not state.closed, "the session is closed")
    require(event, not state.lost, "events were lost before this one; the session cannot be folded further")
    require(event, state.opened == (event.op != Op.OPEN), "a session opens once, with its first event")
    if state.fatal is not None:
        require(event, event.op in (Op.REFUSE, Op.CLOSE), f"the session is poisoned ({state.fatal})")
    moves_generation = event.op in (Op.TRUNCATE, Op.RESTORE)
    expected_generation = state.generation + (1 if moves_generation else 0)
    require(event, event.generation == expected_generation, f"expected generation {expected_generation}")
    try:
        after = RULES[event.op].step(state, event)
    except ValueError as err:
        raise err if isinstance(err, IllegalEvent) else IllegalEvent(event, str(err)) from None
    after = changed(after, next_seq=state.next_seq + 1)
    require(event, event.turn == after.turn, f"expected turn {after.turn}")
    require(
        event,
        after.resident_tokens <= after.n_ctx,
        f"{after.resident_tokens} tokens resident in a context of {after.n_ctx}",
    )
    return after


def check_event(after: ResidencyState, event: Event) -> None:
    """Compare what `event` recorded with the folded state after it. Raises ResidencyMismatch."""
    pairs = (
        ("resident_tokens", event.resident_tokens, after.resident_tokens),
        ("resident_digest", event.resident_digest, after.resident.digest()),
        ("layout_digest", event.layout_digest, lay.layout_digest(after.layout)),
    )
    for what, recorded, folded in pairs:
        if recorded is not None and recorded != folded:
            raise ResidencyMismatch(event, what, recorded, folded)


def fold(events: Iterable[Event], state: ResidencyState | None = None) -> ResidencyState:
    """`apply` and `check_event` over `events` in order."""
    current = state or ResidencyState()
    for event in events:
        current = apply(current, event)
        check_event(current, event)
    return current
