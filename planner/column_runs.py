"""Stretches of events that can be folded as one, found in all rows at once.

    seq     0     1       2        3       4       5      6      7      8       9
    op    open  prompt prefill generate decode   plan  evict  decode evict   decode
    run   |--|  |-----------------------------------|  |---|  |--------------------|
                                                     first of its kind   goes on where it ended

A run holds only rules whose effect is not OTHER (`residency_rules.RULES`). In it seqs count up, turns go on with each
prompt, the generation stays, and

    extends  each begins where the one before stopped, in the tape and in the cache
    evicts   each takes the rows behind those that the one before took: a window that slides
    shifts   each closes the gap of the evict right before it

What is evicted first, or somewhere else, or into the cold store, is a run by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvtape.planner.event_columns import NULL, EventColumns
from kvtape.planner.events import Op
from kvtape.planner.residency_rules import RULES, Effect
from kvtape.planner.table import Bools, Ints

__all__ = ["Run", "runs"]

_IS = {effect: np.array([RULES[op].effect is effect for op in Op]) for effect in Effect}
_FAR = 2**62


class Run(NamedTuple):
    """Rows `first` to `first + n`. Sizes in tokens; places are those at the run's beginning, 0 where not `fit`.

    `tokens` are computed, from tape `start` on; `taken` are evicted, from tape `head` on; `turned` is the sum of all
    shifts. `cache_start`: where the first extend or the end of what shifts would stand; `cache_head`: where the rows
    of `head` stand. `extends`, `evicts`, `shifts`, `placed` (evicts that name their place): how many.
    `most`: by how much the resident tokens grow at most. `least_left`: by how much what is left behind `head` has
    grown when it is smallest after an evict. `lowest`: how far `cache_head` moves at its lowest after a shift.
    `turn` is the turn before, `turns` how many begin. `least_tape`, `most_tape`: between them the tape must be for the
    run's prompts to be legal (one behind a prompt that waits is folded by itself). `prefix`: prefix length of the last
    turn, where one begins. `prompts`: how many, suffixes too; `offered`: where the last one ends.
    """

    first: int
    n: int
    fit: bool
    seq: int
    generation: int
    turn: int
    turns: int
    prefix: int
    prompts: int
    offered: int
    least_tape: int
    most_tape: int
    extends: int
    tokens: int
    start: int
    cache_start: int
    most: int
    evicts: int
    taken: int
    head: int
    placed: int
    cache_head: int
    least_left: int
    shifts: int
    turned: int
    lowest: int


def runs(columns: EventColumns) -> list[Run]:
    """The longest stretches of rows that can be folded as one, and every other row by itself, in order."""
    if not len(columns):
        return []
    rows = _Rows(columns)
    return rows.summed(np.flatnonzero(np.concatenate(([True], ~rows.joined))))


class _Rows:
    """All rows with their effects, and sums over the rows before each."""

    def __init__(self, columns: EventColumns) -> None:
        self.columns = columns
        self.extends, self.prompts = _IS[Effect.EXTEND][columns.op], _IS[Effect.PROMPT][columns.op]
        self.evicts, self.shifts = _IS[Effect.EVICT][columns.op], _IS[Effect.SHIFT][columns.op]
        self.begins = self.prompts & ~columns.suffix
        self.lengths = columns.stop - columns.start
        self.fit = self._fit()
        # What is by itself adds nothing, and says nothing about its neighbours.
        for effect in (self.extends, self.prompts, self.begins, self.evicts, self.shifts):
            effect &= self.fit
        self.grown = _sums(np.where(self.extends, self.lengths, 0))
        self.taken = _sums(np.where(self.evicts, self.lengths, 0))
        self.turned = _sums(np.where(self.shifts, columns.delta, 0))
        self.turns = _sums(self.begins)
        self.placed = self.evicts & (columns.cache_start != NULL)
        turned = self.turned[:-1]
        # Where the run's end and head in the cache would be at row 0, were all rows one run.
        self.ends = np.where(self.extends, columns.cache_start, columns.stop) - self.grown[:-1] - turned
        self.heads = np.where(self.placed, columns.cache_start, columns.start) - self.taken[:-1] - turned
        self.joined = self._joined()

    def _fit(self) -> Bools:
        """Rows whose own numbers are whole."""
        c = self.columns
        ranged = (c.start >= 0) & (self.lengths > 0)
        counted = ranged & ((c.n_tokens == NULL) | (c.n_tokens == self.lengths))
        whole_prompt = (c.start >= 0) & (c.n_tokens >= 0) & (c.suffix | (c.start <= c.n_tokens))
        fit = _IS[Effect.STILL][c.op] | (self.prompts & whole_prompt)
        fit |= self.extends & counted & (c.cache_start >= 0)
        fit |= self.evicts & counted & c.plain & (c.cache_start >= NULL)
        return np.asarray(fit | (self.shifts & counted & self._closing()))

    def _closing(self) -> Bools:
        """Shifts that close the gap of the evict before them."""
        c = self.columns
        slides = np.flatnonzero(self.evicts | self.shifts)
        before, after = slides[:-1], slides[1:]
        evicted = self.lengths[before]
        gap = self.evicts[before] & c.plain[before] & (c.cache_start[before] >= 0)
        closes = gap & (c.start[after] == c.cache_start[before] + evicted) & (c.delta[after] == -evicted)
        closing = np.zeros(len(c), dtype=np.bool_)
        closing[after] = closes
        return closing

    def _joined(self) -> Bools:
        """Bool `[n - 1]`: whether row i + 1 goes on from row i."""
        c = self.columns
        joined = self.fit[1:] & self.fit[:-1]
        joined &= (c.seq[1:] == c.seq[:-1] + 1) & (c.generation[1:] == c.generation[:-1])
        joined &= c.turn[1:] == c.turn[:-1] + self.begins[1:]
        # The row before may be of an earlier run: then this only parts a run in two, or says nothing.
        _part(joined, self.extends, c.start - self.grown[:-1])
        _part(joined, self.extends | self.shifts, self.ends)
        _part(joined, self.placed | self.shifts, self.heads)
        alone = self._evicts_that_do_not_go_on(joined)
        self.fit[alone] = self.evicts[alone] = self.placed[alone] = False
        joined[alone[alone > 0] - 1] = False
        joined[alone[alone < len(c) - 1]] = False
        return joined

    def _evicts_that_do_not_go_on(self, joined: Bools) -> Ints:
        """Rows: an evict goes on when nothing parts it from the one before, and it begins where that one stopped."""
        run = np.concatenate(([0], np.cumsum(~joined)))
        rows = np.flatnonzero(self.evicts)
        before, after = rows[:-1], rows[1:]
        goes_on = (run[after] == run[before]) & (self.columns.start[after] == self.columns.stop[before])
        return rows[np.concatenate(([True], ~goes_on))[: rows.size]]

    def summed(self, first: Ints) -> list[Run]:
        """The runs that begin at rows `first`."""
        c = self.columns
        bounds = np.append(first, len(c))
        base = np.repeat(first, np.diff(bounds))
        rows = np.arange(len(c))
        taken = _sums(np.where(self.evicts, self.lengths, 0))

        def over(sums: Ints) -> Ints:
            return np.asarray(sums[bounds[1:]] - sums[first])

        def opening(which: Bools) -> Ints:
            """The first such row of each run; some row of a later run, or the last, where there is none."""
            return np.minimum.accumulate(np.where(which, rows, len(c) - 1)[::-1])[::-1][first]

        def least(which: Bools, values: Ints, other: int) -> Ints:
            return np.minimum.reduceat(np.where(which, values, other), first)

        def latest(which: Bools) -> Ints:
            return np.asarray(np.maximum.accumulate(np.where(which, rows, 0))[bounds[1:] - 1])

        prompt = latest(self.prompts)
        # The tape's length at the run's beginning for which this row would stand at the tape's end.
        tape = c.start - (self.grown[:-1] - self.grown[base])
        grown, gone = self.grown[1:] - self.grown[base], taken[1:] - taken[base]
        turned = self.turned[1:] - self.turned[base]
        end_row, head_row = opening(self.extends | self.shifts), opening(self.placed | self.shifts)
        parts = (
            first,
            np.diff(bounds),
            self.fit[first],
            c.seq[first],
            c.generation[first],
            c.turn[first] - self.begins[first],
            over(self.turns),
            c.n_tokens[latest(self.begins)],
            over(_sums(self.prompts)),
            c.n_tokens[prompt] + np.where(c.suffix[prompt], c.start[prompt], 0),
            -least(self.prompts, -tape, 0),
            least(self.prompts & c.suffix, tape, _FAR),
            over(_sums(self.extends)),
            over(self.grown),
            c.start[opening(self.extends)],
            self.ends[end_row] + self.grown[first] + self.turned[first],
            -least(self.extends, gone - grown, 0),
            over(_sums(self.evicts)),
            over(taken),
            c.start[opening(self.evicts)],
            over(_sums(self.placed)),
            self.heads[head_row] + self.taken[first] + self.turned[first],
            least(self.evicts, grown - gone, _FAR),
            over(_sums(self.shifts)),
            over(self.turned),
            least(self.shifts, gone + turned, _FAR),
        )
        return list(map(Run, *(part.tolist() for part in parts)))


def _sums(values: Ints | Bools) -> Ints:
    """int64 `[n + 1]`: the sum of the rows before each, and of all."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(values, dtype=np.int64)))


def _part(joined: Bools, which: Bools, values: Ints) -> None:
    """Part the rows where `values` of two `which` rows, one after the other, differ."""
    rows = np.flatnonzero(which)
    joined[rows[1:][values[rows[1:]] != values[rows[:-1]]] - 1] = False
