"""The residency fold over columns: events that join up are folded as one.

    seq     0     1       2        3       4       5      6      7
    op    open  prompt prefill generate decode decode  evict  decode
    run   |--|  |---------------------------------|    |---|  |----|
          apply      one `extend` for all of it        apply  extend

A run holds only rules whose effect is STILL, EXTEND or PROMPT (`residency_rules.RULES`), seqs that count up, turns
that go on with each prompt, one generation, and extends that start where the one before stopped, in the tape and in
the cache. All of that is checked for all rows at once; what is left for each run is one comparison with the state and
one call of the same `extend` that `apply` makes. Every other event, and every event of a run that does not fit its
state, goes through `apply`, which refuses what is illegal by the event's own name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtape.planner.events import Event, Op
from kvtape.planner.residency import apply
from kvtape.planner.residency_rules import RULES, Effect, extend
from kvtape.planner.residency_state import ResidencyState, changed
from kvtape.planner.table import Bools, Ints

__all__ = ["NULL", "OP_CODES", "EventColumns", "fold_columns"]

NULL = -1
"""How a column says that the event has no such value."""

_UNFIT = -2
"""A number that no column of a log can hold: its event is judged by `apply`."""

OP_CODES = {op: code for code, op in enumerate(Op)}
"""`EventColumns.op` of each op."""

_STILL = np.array([RULES[op].effect is Effect.STILL for op in Op])
_EXTEND = np.array([RULES[op].effect is Effect.EXTEND for op in Op])
_PROMPT = np.array([RULES[op].effect is Effect.PROMPT for op in Op])
_LONGEST = 2**62


@dataclass(frozen=True, slots=True)
class EventColumns:
    """One session's events in seq order, int64 `[n]` each, `NULL` where an event has no value; `op` by `OP_CODES`.

    `suffix`, bool: a prompt whose reason is `suffix`. `event(i)` gives row i whole; it is asked only for events
    that are not folded as columns.
    """

    op: npt.NDArray[Any]
    seq: Ints
    turn: Ints
    generation: Ints
    start: Ints
    stop: Ints
    n_tokens: Ints
    cache_start: Ints
    suffix: Bools
    event: Callable[[int], Event]

    def __len__(self) -> int:
        return len(self.seq)

    @classmethod
    def of(cls, events: Sequence[Event]) -> EventColumns:
        """The columns of events at hand."""
        names = ("seq", "turn", "generation", "start", "stop", "n_tokens", "cache_start")
        columns = {name: np.array([_number(getattr(e, name)) for e in events], dtype=np.int64) for name in names}
        op = np.array([OP_CODES[e.op] for e in events], dtype=np.int64)
        suffix = np.array([e.reason == "suffix" for e in events], dtype=np.bool_)
        return cls(op=op, suffix=suffix, event=events.__getitem__, **columns)


def fold_columns(columns: EventColumns, state: ResidencyState | None = None) -> ResidencyState:
    """The state after all events: what `apply` gives one by one. Raises IllegalEvent as `apply` does.

    Like `apply` it does not look at the recorded digests; `fold` does.
    """
    now = state or ResidencyState()
    if not len(columns):
        return now
    for run in _runs(columns):
        after = _folded(now, run) if run.fit else None
        if after is None:
            for i in range(run.first, run.first + run.n):
                now = apply(now, columns.event(i))
        else:
            now = after
    return now


class _Run(NamedTuple):
    """Rows `first` to `first + n`; those that extend hold `tokens` from tape `start` and cache `cache_start`.

    `turn` is the turn before, `turns` how many begin. `least_tape`, `most_tape`: between them the tape must be at the
    run's beginning for its prompts to be legal. `prefix`: prefix length of the last turn, where one begins.
    """

    first: int
    n: int
    fit: bool
    seq: int
    turn: int
    generation: int
    start: int
    cache_start: int
    tokens: int
    turns: int
    prefix: int
    least_tape: int
    most_tape: int


def _folded(state: ResidencyState, run: _Run) -> ResidencyState | None:
    """The state after a run; None when not all of it is legal here."""
    live = state.opened and not (state.closed or state.lost or state.fatal is not None)
    here = (run.seq, run.turn, run.generation) == (state.next_seq, state.turn, state.generation)
    # Rows only grow in a run: when the last state fits the context, all did.
    room = not run.tokens or state.resident_tokens + run.tokens <= state.n_ctx
    if not (live and here and room and run.least_tape <= state.tape_length <= run.most_tape):
        return None
    if run.tokens:
        try:
            state = extend(state, run.start, run.start + run.tokens, run.cache_start)
        except ValueError:
            return None
    prefix = run.prefix if run.turns else state.prefix_length
    return changed(state, next_seq=run.seq + run.n, turn=state.turn + run.turns, prefix_length=prefix)


def _runs(columns: EventColumns) -> list[_Run]:
    """The longest stretches of rows that can be folded as one, and every other row by itself."""
    n = len(columns)
    extends, prompts = _EXTEND[columns.op], _PROMPT[columns.op]
    begins = prompts & ~columns.suffix
    lengths = np.where(extends, columns.stop - columns.start, 0)
    fit = _STILL[columns.op] | (extends & _whole_ranges(columns, lengths)) | (prompts & _whole_prompts(columns))
    lengths[~fit] = 0
    first = np.flatnonzero(np.concatenate(([True], ~_joined(columns, fit, extends, begins))))
    bounds = np.append(first, n)
    so_far = np.concatenate(([0], np.cumsum(lengths)))
    turns = np.concatenate(([0], np.cumsum(begins)))
    # The tape's length at the run's beginning for which this row would stand at the tape's end.
    tape = columns.start - (so_far[:-1] - np.repeat(so_far[first], np.diff(bounds)))
    rows = np.arange(n)
    opening = np.minimum.accumulate(np.where(extends, rows, n - 1)[::-1])[::-1][first]
    latest = np.maximum.accumulate(np.where(begins, rows, 0))[bounds[1:] - 1]
    parts = (
        first,
        np.diff(bounds),
        fit[first],
        columns.seq[first],
        columns.turn[first] - begins[first],
        columns.generation[first],
        columns.start[opening],
        columns.cache_start[opening],
        so_far[bounds[1:]] - so_far[first],
        turns[bounds[1:]] - turns[first],
        columns.n_tokens[latest],
        np.maximum.reduceat(np.where(prompts, tape, 0), first),
        np.minimum.reduceat(np.where(prompts & columns.suffix, tape, _LONGEST), first),
    )
    return list(map(_Run, *(part.tolist() for part in parts)))


def _whole_ranges(columns: EventColumns, lengths: Ints) -> Bools:
    known = (columns.start >= 0) & (columns.cache_start >= 0) & (lengths > 0)
    return np.asarray(known & ((columns.n_tokens == NULL) | (columns.n_tokens == lengths)))


def _whole_prompts(columns: EventColumns) -> Bools:
    known = (columns.start >= 0) & (columns.n_tokens >= 0)
    return np.asarray(known & (columns.suffix | (columns.start <= columns.n_tokens)))


def _joined(columns: EventColumns, fit: Bools, extends: Bools, begins: Bools) -> Bools:
    """Bool `[n - 1]`: whether row i + 1 goes on from row i."""
    turns_on = columns.turn[1:] == columns.turn[:-1] + begins[1:]
    counts_on = (columns.seq[1:] == columns.seq[:-1] + 1) & (columns.generation[1:] == columns.generation[:-1])
    joined = fit[1:] & fit[:-1] & turns_on & counts_on
    rows = np.flatnonzero(extends)
    before, after = rows[:-1], rows[1:]
    # An extend of an earlier run may be the one before: then this only parts a run in two, or says nothing.
    stops = columns.cache_start[before] + columns.stop[before] - columns.start[before]
    meets = (columns.start[after] == columns.stop[before]) & (columns.cache_start[after] == stops)
    joined[after[~meets] - 1] = False
    return np.asarray(joined)


def _number(value: int | None) -> int:
    if value is None:
        return NULL
    return value if 0 <= value < 2**62 else _UNFIT
