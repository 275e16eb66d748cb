"""What each computed token could see: the fold of a session that its numbers follow from.

A *slot* is one computation of one token. A token computed again (refill, rebuild, prefill after a truncation) is a
new slot; a row that leaves and comes back from the cold store or a snapshot is the old one. Slots are numbered in
the order of their computation. An *epoch* is a stretch of queries under one visible set:

    epoch:  keys at key_positions | queries first, first + 1, ... at position, position + 1, ...
            query i sees every key and the queries 0..i of its epoch

How an engine cuts a prefill into calls does not matter here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvtape.planner.events import Event, Op, Way
from kvtape.planner.layout import Layout, next_cache_position, rank_layout
from kvtape.planner.ranges import RangeSet
from kvtape.planner.residency import ResidencyState

__all__ = ["Epoch", "Lineage", "LineageBuilder", "LineageWay", "Rows", "prune", "rebuilds"]

Ints = npt.NDArray[np.int64]
LineageWay = Literal["log", "recompute"]
"""`log`: every evict as its event says; `recompute`: the cache is rebuilt for every evict, admit and refill."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """`n` queries from slot `first` at cache positions from `position`; `keys`, `key_positions` int64 `[k]`."""

    first: int
    n: int
    position: int
    keys: Ints
    key_positions: Ints


@dataclass(frozen=True, slots=True)
class Lineage:
    """`tokens`, `tape` int64 `[n_slots]`: token id and tape position of each slot; epochs in order of computation."""

    tokens: Ints
    tape: Ints
    epochs: tuple[Epoch, ...]

    @property
    def n_slots(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Rows:
    """The resident rows in cache order, each array int64 `[n_rows]`."""

    slots: Ints
    tape: Ints
    cache: Ints
    tokens: Ints


def rebuilds(event: Event, way: LineageWay, *, remove_tail: bool = True) -> bool:
    """Whether a target on `way` carries `event` out by clearing the cache and prefilling what is to be resident."""
    if event.op in (Op.EVICT, Op.TRUNCATE) and event.way == Way.RECOMPUTE:
        return True
    if way == "log":
        return False
    return event.op in (Op.EVICT, Op.ADMIT, Op.RECOMPUTE) or (event.op == Op.TRUNCATE and not remove_tail)


class LineageBuilder:
    """Follows a session event by event; `layout` and `rows()` are what its target should hold after the last one."""

    def __init__(self, way: LineageWay = "log", *, remove_tail: bool = True) -> None:
        self.way = way
        self.layout: Layout = ()
        self._remove_tail = remove_tail
        self._tape: list[int] = []
        self._live: Ints = np.empty(0, np.int64)
        self._cold: dict[int, Ints] = {}
        self._saved: dict[int, tuple[list[int], Ints]] = {}
        self._tokens: list[int] = []
        self._tape_of: list[int] = []
        self._epochs: list[Epoch] = []
        self._growing = False

    def step(self, event: Event, after: ResidencyState, tokens: tuple[int, ...] | None) -> int | None:
        """Follow one event; `after` is the fold after it, `tokens` what it put on the tape.

        Returns the first slot computed by a prefill, decode or refill, None where nothing was. Raises ValueError when
        a prefill or decode comes without its tokens.
        """
        first: int | None = None
        if event.op in (Op.PREFILL, Op.DECODE):
            first = self._extend(event, tokens)
        elif event.op == Op.TRUNCATE:
            del self._tape[after.tape_length :]
            self._live = self._live[: after.tape_length].copy()
        elif event.op == Op.EVICT:
            self._leave(event)
        elif event.op == Op.ADMIT and not rebuilds(event, self.way):
            self._live[_span(event)] = self._cold[_known(event.block_id)]
        elif event.op == Op.RECOMPUTE and not rebuilds(event, self.way):
            first = self._refill(event)
        elif event.op == Op.SNAPSHOT:
            self._saved[_known(event.snapshot_id)] = (list(self._tape), self._live.copy())
        elif event.op == Op.RESTORE:
            tape, live = self._saved[_known(event.snapshot_id)]
            self._tape, self._live = list(tape), live.copy()
        if event.op in _MOVES:
            self._growing = False
        if rebuilds(event, self.way, remove_tail=self._remove_tail):
            self._rebuild(after.resident)
        alive = {b.block_id for b in after.cold}
        self._cold = {i: s for i, s in self._cold.items() if i in alive}
        self.layout = after.layout if self.way == "log" else rank_layout(after.resident)
        return first

    def rows(self) -> Rows:
        """The resident rows, by the layout of this way."""
        slots, cache = self._resident()
        tape = _tape_positions(self.layout)
        return Rows(slots, tape, cache, np.asarray(self._tokens, np.int64)[slots])

    def tokens_of(self, ranges: RangeSet) -> list[int]:
        """The tape's tokens at `ranges`, in tape order."""
        return [token for r in ranges for token in self._tape[r.start : r.stop]]

    def reachable(self) -> Ints:
        """Slots, ascending, that are resident, cold or in a snapshot: the others can never be seen again."""
        parts = [self._live, *self._cold.values(), *(live for _, live in self._saved.values())]
        slots = np.unique(np.concatenate(parts))
        return slots[slots >= 0]

    def lineage(self) -> Lineage:
        return Lineage(np.asarray(self._tokens, np.int64), np.asarray(self._tape_of, np.int64), tuple(self._epochs))

    def _resident(self) -> tuple[Ints, Ints]:
        slots = self._live[_tape_positions(self.layout)]
        cache = [np.arange(s.cache_start, s.cache_stop, dtype=np.int64) for s in self.layout]
        return slots, np.concatenate(cache) if cache else np.empty(0, np.int64)

    def _extend(self, event: Event, tokens: tuple[int, ...] | None) -> int:
        n = _known(event.stop) - _known(event.start)
        if tokens is None or len(tokens) != n:
            raise ValueError(
                f"seq {event.seq} ({event.op}) computes {n} tokens, the log gives {tokens and len(tokens)}"
            )
        start = len(self._tape)
        self._tape.extend(tokens)
        self._live = np.concatenate([self._live, np.full(n, -1, np.int64)])
        if self._growing:
            first = self._new_slots(np.arange(start, start + n))
            self._epochs[-1] = replace(self._epochs[-1], n=self._epochs[-1].n + n)
            return first
        keys, key_positions = self._resident()
        self._growing = True
        return self._compute(np.arange(start, start + n), next_cache_position(self.layout), keys, key_positions)

    def _leave(self, event: Event) -> None:
        for ref in (event.blocks or ()) if event.cold else ():
            self._cold[ref.block_id] = self._live[ref.start : ref.stop].copy()
        self._live[_span(event)] = -1

    def _refill(self, event: Event) -> int:
        at = _known(event.cache_start)
        keys, key_positions = self._resident()
        before = key_positions < at
        span = _span(event)
        return self._compute(np.arange(span.start, span.stop), at, keys[before], key_positions[before])

    def _rebuild(self, resident: RangeSet) -> None:
        self._live[:] = -1
        nothing = np.empty(0, np.int64)
        if resident:
            self._compute(_tape_positions(rank_layout(resident)), 0, nothing, nothing)

    def _compute(self, tape: Ints, position: int, keys: Ints, key_positions: Ints) -> int:
        first = self._new_slots(tape)
        self._epochs.append(Epoch(first, len(tape), position, keys, key_positions))
        return first

    def _new_slots(self, tape: Ints) -> int:
        first = len(self._tokens)
        self._live[tape] = np.arange(first, first + len(tape))
        self._tokens.extend(self._tape[t] for t in tape)
        self._tape_of.extend(int(t) for t in tape)
        return first


_MOVES = frozenset({Op.TRUNCATE, Op.EVICT, Op.ADMIT, Op.SHIFT, Op.RECOMPUTE, Op.RESTORE})


def prune(lineage: Lineage, wanted: Ints) -> tuple[Lineage, Ints]:
    """The lineage without the slots that no wanted slot depends on, and `wanted` in its numbering."""
    needed = np.zeros(lineage.n_slots, bool)
    needed[wanted] = True
    counts: list[int] = []
    for epoch in reversed(lineage.epochs):
        queries = np.flatnonzero(needed[epoch.first : epoch.first + epoch.n])
        n = int(queries[-1]) + 1 if len(queries) else 0
        counts.append(n)
        needed[epoch.first : epoch.first + n] = True
        if n:
            needed[epoch.keys] = True
    number = np.cumsum(needed) - 1
    epochs = [
        replace(epoch, first=int(number[epoch.first]), n=n, keys=number[epoch.keys])
        for epoch, n in zip(lineage.epochs, reversed(counts), strict=True)
        if n
    ]
    return Lineage(lineage.tokens[needed], lineage.tape[needed], tuple(epochs)), number[wanted]


def _tape_positions(layout: Layout) -> Ints:
    parts = [np.arange(s.tape_start, s.tape_stop, dtype=np.int64) for s in layout]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _span(event: Event) -> slice:
    return slice(_known(event.start), _known(event.stop))


def _known(value: int | None) -> int:
    if value is None:
        raise ValueError("the fold accepted an event without a field that it needs")
    return value
