"""One session's events as columns: what a fold over many events at once reads of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtape.planner.events import Event, Op, Way
from kvtape.planner.table import Bools, Ints

__all__ = ["NULL", "OP_CODES", "UNFIT", "EventColumns"]

NULL = -1
"""How a column says that the event has no such value."""

UNFIT = -2
"""A number that no column of a log can hold: its event is judged by `apply`."""

OP_CODES = {op: code for code, op in enumerate(Op)}
"""`EventColumns.op` of each op."""


@dataclass(frozen=True, slots=True)
class EventColumns:
    """One session's events in seq order, int64 `[n]` each, `NULL` where an event has no value; `op` by `OP_CODES`.

    `delta` is 0 where an event has none. Bool: `suffix`, a prompt whose reason is `suffix`; `plain`, an evict by
    surgery whose rows go nowhere (not `recompute`, not into the cold store). `event(i)` gives row i whole; it is
    asked only for events that are not folded as columns.
    """

    op: npt.NDArray[Any]
    seq: Ints
    turn: Ints
    generation: Ints
    start: Ints
    stop: Ints
    n_tokens: Ints
    cache_start: Ints
    delta: Ints
    suffix: Bools
    plain: Bools
    event: Callable[[int], Event]

    def __len__(self) -> int:
        return len(self.seq)

    @classmethod
    def of(cls, events: Sequence[Event]) -> EventColumns:
        """The columns of events at hand."""
        names = ("seq", "turn", "generation", "start", "stop", "n_tokens", "cache_start")
        columns = {name: np.array([_number(getattr(e, name)) for e in events], dtype=np.int64) for name in names}
        return cls(
            op=np.array([OP_CODES[e.op] for e in events], dtype=np.int64),
            delta=np.array([_delta(e.delta) for e in events], dtype=np.int64),
            suffix=np.array([e.reason == "suffix" for e in events], dtype=np.bool_),
            plain=np.array([e.way in (Way.GAP, Way.REBASED) and not e.cold for e in events], dtype=np.bool_),
            event=events.__getitem__,
            **columns,
        )


def _number(value: int | None) -> int:
    if value is None:
        return NULL
    return value if 0 <= value < 2**62 else UNFIT


def _delta(value: int | None) -> int:
    """0, which no shift may have, also for a move that no cache is long enough for."""
    return value if value is not None and abs(value) < 2**31 else 0
