"""The backend's own account of its rows: which (tape position, token) stands at which cache position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import InputRejected, UnsupportedOperation
from kvtape.planner import layout as lay
from kvtape.planner.layout import Layout
from kvtape.planner.ranges import RangeSet

__all__ = ["Books"]

_TAPE_MAX: Final = 2**31


@dataclass(frozen=True, slots=True, eq=False)
class Books:
    """Immutable: an operation makes new books, and the backend takes them over once the engine agrees.

    `tape` int32 holds the token id at each tape position; only resident positions mean anything. Methods raise
    InputRejected when an operation does not fit.
    """

    layout: Layout = ()
    tape: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def n_rows(self) -> int:
        return sum(s.length for s in self.layout)

    def cache_positions(self) -> npt.NDArray[np.int64]:
        """Of every row, ascending."""
        spans = [np.arange(s.cache_start, s.cache_stop, dtype=np.int64) for s in self.layout]
        return np.concatenate(spans) if spans else np.zeros(0, np.int64)

    def tape_positions(self) -> npt.NDArray[np.int64]:
        """Of every row, ascending."""
        spans = [np.arange(s.tape_start, s.tape_stop, dtype=np.int64) for s in self.layout]
        return np.sort(np.concatenate(spans)) if spans else np.zeros(0, np.int64)

    def tape_positions_at(self, cache_positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of the rows at these cache positions, in the same order. Raises InputRejected where no row stands."""
        known = self.cache_positions()
        spans = [np.arange(s.tape_start, s.tape_stop, dtype=np.int64) for s in self.layout]
        at = np.searchsorted(known, cache_positions)
        if len(cache_positions) and (
            not len(known) or not np.array_equal(known.take(at, mode="clip"), cache_positions)
        ):
            raise InputRejected("a cache position that is not on the books")
        return np.concatenate(spans)[at] if len(cache_positions) else np.zeros(0, np.int64)

    def cache_start_of(self, start: int, stop: int) -> int:
        """Cache position of tape position `start`; `[start, stop)` must be one run in tape and cache."""
        at = lay.run_start(self.layout, start, stop)
        if at is None:
            raise InputRejected(f"[{start}, {stop}) is not one run of resident rows")
        return at

    def place_of(self, tape_start: int) -> int:
        """Cache position at which a token of `tape_start` stands or, when it is not here, would be computed.

        Never before a row that comes earlier in the tape.
        """
        end = self._end_before(tape_start)
        at = lay.run_start(self.layout, tape_start, tape_start + 1)
        return end if at is None else max(end, at)

    def place_behind(self, tape_start: int) -> int:
        """The same. Raises UnsupportedOperation when there is a hole right before it."""
        end, place = self._end_before(tape_start), self.place_of(tape_start)
        if 0 < end < place:
            why = f"no row stands before cache position {place}, that of tape position {tape_start}"
            raise UnsupportedOperation("score", f"{why}; begin further left, or close the hole")
        return place

    def append(self, tokens: Sequence[int], tape_start: int, cache_start: int) -> Books:
        """With these rows too; they may stand anywhere that is free in the tape and in the cache."""
        if not (0 <= tape_start < _TAPE_MAX - len(tokens) and 0 <= cache_start < _TAPE_MAX - len(tokens)):
            raise InputRejected(f"tape {tape_start}, cache {cache_start}: positions must be in [0, {_TAPE_MAX})")
        try:
            layout = lay.append(self.layout, tape_start, len(tokens), cache_start)
        except ValueError as err:
            raise InputRejected(str(err)) from None
        tape_stop = tape_start + len(tokens)
        tape = np.zeros(max(len(self.tape), tape_stop), np.int32)
        tape[: len(self.tape)] = self.tape
        tape[tape_start:tape_stop] = tokens
        return Books(layout, tape)

    def remove(self, start: int, stop: int) -> Books:
        return replace(self, layout=lay.remove(self.layout, start, stop))

    def cut(self, tape_stop: int) -> Books:
        return replace(self, layout=lay.cut(self.layout, tape_stop))

    def shift(self, cache_start: int, cache_stop: int, delta: int) -> Books:
        """Raises InputRejected when rows would fall below 0, onto others, or when none moves."""
        if not any(s.cache_start < cache_stop and cache_start < s.cache_stop for s in self.layout):
            raise InputRejected(f"shift of [{cache_start}, {cache_stop}): no row stands there")
        try:
            return replace(self, layout=lay.shift(self.layout, cache_start, cache_stop, delta))
        except ValueError as err:
            raise InputRejected(f"shift of [{cache_start}, {cache_stop}) by {delta}: {err}") from None

    def tokens_of(self, start: int, stop: int) -> list[int]:
        return [int(token) for token in self.tape[start:stop]]

    def to_json(self) -> list[list[Any]]:
        """`[[tape_start, cache_start, [token, ...]], ...]` in cache order."""
        return [[s.tape_start, s.cache_start, self.tokens_of(s.tape_start, s.tape_stop)] for s in self.layout]

    @staticmethod
    def from_json(segments: Sequence[Sequence[Any]]) -> Books:
        books = Books()
        for tape_start, cache_start, tokens in segments:
            books = books.append(tokens, tape_start, cache_start)
        return books

    @staticmethod
    def ranked(ranges: RangeSet, tokens: Sequence[int]) -> Books:
        """Of a fresh prefill of `tokens`, which are those of `ranges` in order."""
        books, at = Books(), 0
        for r in ranges:
            books = books.append(tokens[at : at + len(r)], r.start, at)
            at += len(r)
        return books

    def _end_before(self, tape_start: int) -> int:
        """One past the last cache position of the rows that come before `tape_start`."""
        return lay.next_cache_position(lay.cut(self.layout, tape_start))
