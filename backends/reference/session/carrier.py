"""What carries the rows of a session, and how tokens pass through the layers over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtape.backends.protocol import KvRows
from kvtape.backends.reference.errors import BackendFailure
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.dispatch import LayerRows, advance
from kvtape.backends.reference.model.ffn import FfnRouter
from kvtape.backends.reference.model.steps import embed
from kvtape.backends.reference.model.tokens import Ids
from kvtape.backends.reference.model.weights import Weights
from kvtape.backends.reference.session.mass import HeadSums

__all__ = ["Carrier", "WatchedFfn", "run_layers"]

Positions = npt.NDArray[np.int64]


class Carrier(Protocol):
    """Rows at cache positions. A carrier that raised in the middle is to be taken back or dropped by its owner."""

    @property
    def resident_bytes(self) -> int: ...

    @property
    def allocated_bytes(self) -> int: ...

    def fresh(self) -> Carrier:
        """One of the same kind without rows."""

    def compute(self, ids: Ids, at: int, sums: HeadSums | None) -> tuple[Floats, int]:
        """New rows from cache position `at` on: the last row `[1, n_embd]` behind all layers, and forwards made."""

    def undo_point(self, start: int, stop: int) -> Callable[[], None]:
        """What brings the rows of now back, after a computation at cache positions `[start, stop)` or a part of it."""

    def difference(self, positions: Positions) -> str | None:
        """How what is held differs from rows at these ascending positions in every layer; None if it does not."""

    def witness(self, positions: Positions) -> tuple[Positions, KvRows]:
        """The rows that are held, read from where attention reads them. `positions` are those on the books."""

    def save(self) -> bytes: ...

    def loaded(self, payload: bytes, positions: Positions) -> Carrier:
        """One with saved rows. Raises StateRejected for bytes that are not the rows at `positions`."""


class WatchedFfn:
    """The router of a session: between the layers it is asked whether to go on.

    `check` raises what ends the computation. `fail_next`: the next pass fails in the last layer, as a feed-forward
    that gives no answer would.
    """

    name = "local"

    def __init__(self, inner: FfnRouter, n_layer: int, check: Callable[[], None]) -> None:
        self._inner, self._last, self._check = inner, n_layer - 1, check
        self.fail_next = False

    def feed(self, layer: int, h: Floats) -> Floats:
        self._check()
        if self.fail_next and layer == self._last:
            self.fail_next = False
            raise BackendFailure(f"the feed-forward of layer {layer} gave no answer: it was told to fail")
        return self._inner.feed(layer, h)


def run_layers(
    weights: Weights, router: FfnRouter, ids: Ids, at: int, rows: LayerRows, sums: HeadSums | None
) -> Floats:
    """All rows `[n, n_embd]` of `ids` at cache positions from `at` on, attending to what `rows` shows them."""
    positions = np.arange(at, at + len(ids), dtype=np.int64)
    return advance(weights, router, embed(weights, ids), positions, rows, sums.observer if sums is not None else None)
