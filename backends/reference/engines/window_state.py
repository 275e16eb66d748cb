"""What `windowed-checkpoint` keeps: the open window's rows, one row of each closed window, and all tokens.

    window 0           window 1           window 2 (open)
    [. . . . . . c0]   [. . . . . . c1]   [t t t           ]      c  checkpoint: that row's K and V, every layer
     archived tokens    archived tokens    c1 and rows of its own are attended to

Position p stands in window p // size, and its rows are those of a session that never saw earlier windows but for the
one checkpoint in front.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtape.backends.reference.errors import InvariantViolation
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.kv_rows import KvRows
from kvtape.backends.reference.model.tokens import Ids
from kvtape.backends.reference.model.weights import Weights

__all__ = ["Checkpoint", "WindowState"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The last row of a closed window: `keys` `[n_layer, n_head_kv, head_dim_k]`, rotated for `position`; `values`."""

    position: int
    keys: Floats
    values: Floats

    def put_into(self, rows: KvRows) -> None:
        """The row, in every layer, where it belongs."""
        at = np.array([self.position], np.int64)
        for layer, store in enumerate(rows.layers):
            store.put(at, self.keys[layer, None], self.values[layer, None])


class WindowState:
    def __init__(self, weights: Weights, size: int) -> None:
        self.size = size
        self.open = KvRows(weights)
        self.checkpoints: list[Checkpoint] = []
        self.archive: list[Ids] = []
        self.open_ids: Ids = np.empty(0, np.int32)

    @property
    def n_tokens(self) -> int:
        return self.size * len(self.archive) + len(self.open_ids)

    @property
    def room(self) -> int:
        """Tokens until the open window is full."""
        return self.size - len(self.open_ids)

    def take(self, ids: Ids) -> None:
        """Tokens, at most `room` of them, whose rows every layer has taken in. A full window is closed."""
        ids = np.concatenate([self.open_ids, ids])
        if len(ids) < self.size:
            self.open_ids = ids
            return
        checkpoint = self._last_row(self.size * (len(self.archive) + 1) - 1)
        self.open.drop_below(checkpoint.position)
        self.checkpoints.append(checkpoint)
        self.archive.append(ids)
        self.open_ids = ids[:0].copy()

    def rewind(self) -> None:
        """Take back what a failed step left in any layer. Raises InvariantViolation where rows are missing then."""
        self.open.truncate(self.n_tokens)
        expected = len(self.open_ids) + bool(self.archive)
        if any(store.n_rows != expected for store in self.open.layers) or len(self.archive) != len(self.checkpoints):
            raise InvariantViolation(f"a layer does not hold {expected} rows after {self.n_tokens} tokens")

    def row(self, layer: int, position: int) -> tuple[Floats, Floats] | None:
        """Key and value: of the open window, its checkpoint in front, and every closed window's last row."""
        window, place = divmod(position, self.size)
        if position >= 0 and place == self.size - 1 and window < len(self.checkpoints):
            checkpoint = self.checkpoints[window]
            return checkpoint.keys[layer].copy(), checkpoint.values[layer].copy()
        return self.open.row(layer, position)

    def _last_row(self, position: int) -> Checkpoint:
        rows = [self.open.row(layer, position) for layer in range(len(self.open.layers))]
        there = [row for row in rows if row is not None]
        if len(there) < len(rows):
            raise InvariantViolation(f"a layer has no row at {position}, the end of a window")
        return Checkpoint(position, np.stack([keys for keys, _ in there]), np.stack([values for _, values in there]))
