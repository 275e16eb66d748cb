"""Rows that come at the end and leave at either end, in one array that grows by a quarter."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["GrowingRows"]

Rows = npt.NDArray[Any]


class GrowingRows:
    """Begins with a copy of `rows` `[n, width]`, whose width and type all others have."""

    def __init__(self, rows: Rows) -> None:
        self._array = rows.copy()
        self._start, self._stop = 0, len(rows)

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def view(self) -> Rows:
        """`[n, width]`; later changes may show through, or not."""
        return self._array[self._start : self._stop]

    def append(self, rows: Rows) -> None:
        """A failure changes nothing."""
        needed = self._stop + len(rows)
        if needed > len(self._array):
            # The first filling takes what it needs; dead rows at the front are used again before memory is asked for.
            live = len(self)
            size = live + max(len(rows), live // 4 if live else 0)
            grown = np.empty((size, self._array.shape[1]), self._array.dtype)
            grown[:live] = self.view
            self._array, self._start, self._stop = grown, 0, live
        self._array[self._stop : self._stop + len(rows)] = rows
        self._stop += len(rows)

    def truncate(self, n: int) -> None:
        """Keep the first `n` rows."""
        self._stop = self._start + min(n, len(self))

    def drop_first(self, n: int) -> None:
        """Lose the first `n` rows. Their memory is given back once it is more than that of the others."""
        self._start += min(n, len(self))
        if self._start > len(self):
            array = self.view.copy()
            self._array, self._start, self._stop = array, 0, len(array)

    @property
    def occupied_bytes(self) -> int:
        return int(self.view.nbytes)

    @property
    def allocated_bytes(self) -> int:
        return int(self._array.nbytes)
