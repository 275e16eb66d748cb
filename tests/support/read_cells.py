"""What the residency map says of a cell, as numbers, and the same from the fold, event by event."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.planner.events import Event
from kvtape.planner.residency import apply
from kvtape.planner.residency_state import ResidencyState

__all__ = ["Cell", "folded_cell", "folded_state", "read_cell"]

_SAID = re.compile(
    r"Events? (?P<e0>[\d,]+)(?: to (?P<e1>[\d,]+))?, positions? (?P<p0>[\d,]+)(?: to (?P<p1>[\d,]+))?: "
    r"(?P<states>.*?)(?: of (?P<pairs>[\d,]+) pairs)?$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Cell:
    """Events and positions, both ends included, and (position, event) pairs by the name of their state."""

    events: tuple[int, int]
    positions: tuple[int, int]
    states: Counter[str]


def read_cell(said: str) -> Cell:
    found = _SAID.match(said)
    assert found, said
    e0, p0 = _number(found["e0"]), _number(found["p0"])
    events = (e0, _number(found["e1"]) if found["e1"] else e0)
    positions = (p0, _number(found["p1"]) if found["p1"] else p0)
    states: Counter[str] = Counter()
    if not found["pairs"]:
        states[found["states"]] = 1
        return Cell(events, positions, states)
    for part in re.split(r", (?=\d)", found["states"]):
        n, state = part.split(" ", 1)
        states[state] = _number(n)
    assert states.total() == _number(found["pairs"])
    return Cell(events, positions, states)


def folded_cell(events: Sequence[Event], cell: Cell, *, sink: int, recent: int) -> Counter[str]:
    """The states of a cell's pairs, from the fold; `sink`, `recent`: the policy's spans in tokens."""
    states: Counter[str] = Counter()
    state = ResidencyState()
    for event in events[: cell.events[1] + 1]:
        state = apply(state, event)
        if event.seq >= cell.events[0]:
            for position in range(cell.positions[0], cell.positions[1] + 1):
                states[folded_state(state, position, sink, recent)] += 1
    return states


def folded_state(state: ResidencyState, position: int, sink: int, recent: int) -> str:
    """The name of what a position is in a state of the fold."""
    if position >= state.tape_length:
        return "not yet"
    if position in state.resident:
        return "sink" if position < sink else "recent" if position >= state.tape_length - recent else "resident"
    return "cold" if position in state.cold_ranges else "dropped"


def _number(text: str) -> int:
    return int(text.replace(",", ""))
