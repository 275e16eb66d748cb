"""Key and value rows of one layer, in pages by cache position.

A page holds the rows of `PAGE` consecutive positions, wherever else rows are missing: row p stands in page p // PAGE at
p % PAGE. Attention works page by page, so a row meets the same partial sums whether its neighbours are there, were
evicted, or are hidden from a query; that is what makes a windowed cache and a masked full one equal to the bit.

    page 0           page 1           page 2
    [0 1 2 3 ...  ]  [. . . . ...  ]  [. . 514 515 516 -]      .  dead (zeros)   -  not yet there
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtape.backends.reference.model.blas import Floats

__all__ = ["PAGE", "PageStore", "Pages", "paged"]

PAGE: Final = 256
"""Positions of a page, a power of two: large enough for BLAS, small enough that a decode computes little in vain."""

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pages:
    """`keys` `[n_kv_head, n_pages, PAGE, head_dim_k]`, `values` alike; `live` `[n_pages, PAGE]`; the `first` index."""

    keys: Floats
    values: Floats
    live: npt.NDArray[np.bool_]
    first: int

    @property
    def positions(self) -> Positions:
        """Of live rows, ascending."""
        return np.flatnonzero(self.live.ravel()).astype(np.int64) + self.first * PAGE


class PageStore:
    """Rows that come and go. A forward appends behind the last one; surgery takes rows out and puts some anywhere."""

    def __init__(self, n_kv_head: int, head_dim_k: int, head_dim_v: int, dtype: np.dtype[Any]) -> None:
        self._keys: Floats = np.zeros((n_kv_head, 0, PAGE, head_dim_k), dtype)
        self._values: Floats = np.zeros((n_kv_head, 0, PAGE, head_dim_v), dtype)
        self._live = np.zeros((0, PAGE), np.bool_)
        self._first = 0
        self._stop = 0

    def append(self, positions: Positions, keys: Floats, values: Floats) -> None:
        """Rows `keys` `[n, n_kv_head, head_dim_k]` and `values` at ascending `positions` `[n]` past every row here."""
        if len(positions) and positions[0] < self._stop:
            raise ValueError(f"rows at {positions[0]}.. do not come behind position {self._stop - 1}")
        self.put(positions, keys, values)

    def put(self, positions: Positions, keys: Floats, values: Floats) -> None:
        """The same at ascending positions that are free, wherever they are. ValueError changes nothing."""
        if not len(positions):
            return
        if positions[0] < 0 or np.any(np.diff(positions) <= 0):
            raise ValueError(f"positions {positions[0]}.. do not ascend from 0 on")
        page, place = self._where(positions)
        here = (page >= 0) & (page < len(self._live))
        if self._live[page[here], place[here]].any():
            raise ValueError(f"a row stands already at one of the positions {positions[0]}..{positions[-1]}")
        self._cover(int(positions[0]) // PAGE, int(positions[-1]) // PAGE + 1)
        page, place = self._where(positions)
        self._keys[:, page, place] = keys.transpose(1, 0, 2)
        self._values[:, page, place] = values.transpose(1, 0, 2)
        # In this order: a row that is live is one that `truncate` reaches, whenever this is interrupted.
        self._stop = max(self._stop, int(positions[-1]) + 1)
        self._live[page, place] = True

    def rows(self, start: int, stop: int) -> tuple[Positions, Floats, Floats]:
        """Positions `[n]`, keys `[n, n_kv_head, head_dim_k]` and values of the rows at `[start, stop)`, as copies."""
        positions = self._within(start, stop)
        page, place = self._where(positions)
        keys, values = self._keys[:, page, place], self._values[:, page, place]
        return positions, keys.transpose(1, 0, 2).copy(), values.transpose(1, 0, 2).copy()

    def truncate(self, stop: int) -> None:
        """Remove every row at or past position `stop`."""
        if stop < self._stop:
            self.remove(max(stop, 0), self._stop)
            self._stop = max(stop, 0)

    def drop_below(self, start: int) -> None:
        """Remove every row before position `start`, and give back the pages that are empty then."""
        self.remove(self._first * PAGE, start)
        empty = min(start // PAGE - self._first, len(self._live))
        if empty > 0:
            # Copies: a view would keep the dropped pages alive. All of them first: a copy may fail.
            keys, values, live = self._keys[:, empty:].copy(), self._values[:, empty:].copy(), self._live[empty:].copy()
            self._keys, self._values, self._live, self._first = keys, values, live, self._first + empty

    def remove(self, start: int, stop: int) -> None:
        """Remove the rows at positions `[start, stop)`. Their places are zeroed: a dead row leaves nothing behind."""
        page, place = self._where(self._within(start, stop))
        # Dead first: what is live is never half a row.
        self._live[page, place] = False
        self._keys[:, page, place] = 0
        self._values[:, page, place] = 0

    def clear(self) -> None:
        """Remove every row, and give all memory back."""
        keys, values, live = self._keys[:, :0].copy(), self._values[:, :0].copy(), self._live[:0].copy()
        self._keys, self._values, self._live, self._first, self._stop = keys, values, live, 0, 0

    def pages(self) -> Pages:
        """All rows, as a view that later changes show through."""
        n = max(0, -(-self._stop // PAGE) - self._first)
        return Pages(self._keys[:, :n], self._values[:, :n], self._live[:n], self._first)

    def row(self, position: int) -> tuple[Floats, Floats] | None:
        """Copies of the key `[n_kv_head, head_dim_k]` and the value at `position`; None where there is no such row."""
        positions, keys, values = self.rows(position, position + 1)
        return (keys[0], values[0]) if len(positions) else None

    @property
    def stop(self) -> int:
        """One past the last position that was written and not truncated."""
        return self._stop

    @property
    def n_rows(self) -> int:
        return int(np.count_nonzero(self._live))

    @property
    def row_bytes(self) -> int:
        """Of one key and one value row."""
        heads, *_, dim_k = self._keys.shape
        return int(heads * (dim_k + self._values.shape[-1]) * self._keys.itemsize)

    @property
    def allocated_bytes(self) -> int:
        return int(self._keys.nbytes + self._values.nbytes)

    def _within(self, start: int, stop: int) -> Positions:
        base = self._first * PAGE
        low, high = max(start - base, 0), max(min(stop - base, self._live.size), 0)
        return np.flatnonzero(self._live.ravel()[low:high]).astype(np.int64) + (base + low)

    def _where(self, positions: Positions) -> tuple[Positions, Positions]:
        return positions // PAGE - self._first, positions % PAGE

    def _cover(self, first: int, stop: int) -> None:
        """Have pages `[first, stop)`. A first filling takes what it needs; later growth at the end is by a quarter, so
        that decoding copies seldom.
        """
        if not self._live.any():
            self.clear()
            self._first = first
        have = len(self._live)
        before, behind = max(0, self._first - first), max(0, stop - self._first - have)
        if behind and have:
            behind = max(behind, have // 4)
        if before or behind:
            keys, values = _grown(self._keys, before, behind), _grown(self._values, before, behind)
            live = np.pad(self._live, ((before, behind), (0, 0)))
            self._keys, self._values, self._live, self._first = keys, values, live, self._first - before


def paged(positions: Positions, keys: Floats, values: Floats) -> Pages:
    """Rows `[n, n_kv_head, head_dim]` at ascending positions as pages: for engines that keep them in another form."""
    store = PageStore(keys.shape[1], keys.shape[2], values.shape[2], keys.dtype)
    store.append(positions, keys, values)
    return store.pages()


def _grown(rows: Floats, before: int, behind: int) -> Floats:
    heads, n_pages, page, dim = rows.shape
    out: Floats = np.zeros((heads, before + n_pages + behind, page, dim), rows.dtype)
    out[:, before : before + n_pages] = rows
    return out
