"""Slots that fail: at which time which slot is gone for good."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Final

from kvtape.sim.errors import SimulationError
from kvtape.sim.modelled_time import END_OF_TIME_NS

__all__ = ["SlotFailure", "failure_times", "parse_slot_failure"]

_SLOT: Final = re.compile("[0-9]{1,10}")
_LATEST_S: Final = END_OF_TIME_NS // 10**9


@dataclass(frozen=True, slots=True)
class SlotFailure:
    """`slot` fails at `at_ns` of simulated time; None: the lowest of those that are left then."""

    at_ns: int
    slot: int | None = None


def parse_slot_failure(text: str) -> SlotFailure:
    """`12.5` or `12.5:3`: seconds, and the slot. Raises SimulationError."""
    at, colon, slot = text.partition(":")
    try:
        seconds = Decimal(at)
    except InvalidOperation:
        seconds = Decimal(-1)
    if not seconds.is_finite() or seconds < 0 or (colon and not _SLOT.fullmatch(slot)):
        raise SimulationError(f"slot failure {text!r}: give seconds from the start, and the slot: 12.5 or 12.5:3")
    if seconds > _LATEST_S:
        raise SimulationError(f"slot failure {text!r}: no simulated time is later than 292 years; leave it out")
    return SlotFailure(round(seconds * 10**9), int(slot) if colon else None)


def failure_times(failures: Sequence[SlotFailure], n_slots: int) -> dict[int, int]:
    """When each slot that fails does, in ns, by slot; one that has failed cannot again.

    Raises SimulationError for a slot that the machine does not have.
    """
    times: dict[int, int] = {}
    for failure in sorted(failures, key=lambda f: f.at_ns):
        if failure.slot is not None and failure.slot >= n_slots:
            raise SimulationError(f"slot {failure.slot} cannot fail: the machine has slots 0 to {n_slots - 1}")
        left = (s for s in range(n_slots) if s not in times)
        slot = next(left, None) if failure.slot is None else failure.slot
        if slot is not None:
            times.setdefault(slot, failure.at_ns)
    return times
