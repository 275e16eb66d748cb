"""Keys and values that surgery can be done on: removed, moved with their keys turned, put back, shown in part.

A row that stays is never touched. A key that moves is turned by the difference in float64 and rounded once, so that
many moves do not add up to more than their roundings.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import StateRejected
from kvtape.backends.protocol import KvRows as StoredRows
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.dispatch import NewRows, Seen
from kvtape.backends.reference.model.ffn import FfnRouter
from kvtape.backends.reference.model.kv_rows import KvRows
from kvtape.backends.reference.model.pages import PageStore
from kvtape.backends.reference.model.tokens import Ids
from kvtape.backends.reference.model.weights import Weights
from kvtape.backends.reference.session.carrier import run_layers
from kvtape.backends.reference.session.mass import HeadSums

__all__ = ["ResidentRows"]

Positions = npt.NDArray[np.int64]


class ResidentRows:
    """A `Carrier` over one `PageStore` a layer, by cache position."""

    def __init__(self, weights: Weights, router: FfnRouter) -> None:
        self._weights, self._router = weights, router
        self._rows = KvRows(weights)

    @property
    def layers(self) -> tuple[PageStore, ...]:
        return self._rows.layers

    @property
    def resident_bytes(self) -> int:
        return self._rows.occupied_bytes

    @property
    def allocated_bytes(self) -> int:
        return self._rows.allocated_bytes

    def fresh(self) -> ResidentRows:
        return ResidentRows(self._weights, self._router)

    # -- computing ------------------------------------------------------------------------------------------------

    def compute(self, ids: Ids, at: int, sums: HeadSums | None) -> tuple[Floats, int]:
        """Rows may stand behind the new ones: those are not seen by position."""
        return run_layers(self._weights, self._router, ids, at, self, sums)[-1:], 1

    def compute_each(self, ids: Ids, at: int) -> Floats:
        """New rows as `compute` makes them, and every row `[n, n_embd]` behind all layers."""
        return run_layers(self._weights, self._router, ids, at, self, None)

    def seen(self, layer: int, new: NewRows) -> Seen:
        store = self.layers[layer]
        store.put(new.positions, new.keys, new.values)
        return Seen(store.pages())

    def probe(self, ids: Ids, at: int, before: Positions, sums: HeadSums) -> None:
        """Compute `ids` over the rows at `before` alone, and keep nothing."""
        run_layers(self._weights, self._router, ids, at, _Shown(self.layers, before), sums)

    def undo_point(self, start: int, stop: int) -> Callable[[], None]:
        def undo() -> None:
            self.remove(start, stop)

        return undo

    # -- surgery --------------------------------------------------------------------------------------------------

    def remove(self, start: int, stop: int) -> None:
        for store in self.layers:
            store.remove(start, stop)

    def move(self, start: int, stop: int, delta: int) -> None:
        """The rows at `[start, stop)` to positions that are free, or are left by them."""
        for layer, store in enumerate(self.layers):
            positions, keys, values = store.rows(start, stop)
            store.remove(start, stop)
            store.put(positions + delta, self._turned(layer, keys, delta), values)

    def export(self, start: int, stop: int) -> bytes:
        """Keys, then values of each layer in turn, rows in cache order."""
        parts = [store.rows(start, stop)[1:] for store in self.layers]
        return b"".join(rows.tobytes() for pair in parts for rows in pair)

    def admit(self, payload: bytes, saved_at: int, n: int, cache_start: int) -> None:
        """Rows that `export` gave, which stood at `saved_at` then. Raises StateRejected before anything changes."""
        parts = self._parts(payload, n)
        positions = np.arange(cache_start, cache_start + n, dtype=np.int64)
        for layer, (store, (keys, values)) in enumerate(zip(self.layers, parts, strict=True)):
            store.put(positions, self._turned(layer, keys, cache_start - saved_at), values)

    # -- looking and saving ---------------------------------------------------------------------------------------

    def difference(self, positions: Positions) -> str | None:
        for layer, store in enumerate(self.layers):
            if not np.array_equal(store.pages().positions, positions):
                return f"layer {layer} holds {store.n_rows} rows that differ from the {len(positions)} on the books"
        return None

    def witness(self, positions: Positions) -> tuple[Positions, StoredRows]:
        parts = [store.rows(0, store.stop) for store in self.layers]
        keys, values = (tuple(_flat(part[i]) for part in parts) for i in (1, 2))
        return parts[0][0], StoredRows(keys, values)

    def save(self) -> bytes:
        return self.export(0, self.layers[0].stop)

    def loaded(self, payload: bytes, positions: Positions) -> ResidentRows:
        rows = self.fresh()
        for store, (keys, values) in zip(rows.layers, self._parts(payload, len(positions)), strict=True):
            store.put(positions, keys, values)
        return rows

    def _turned(self, layer: int, keys: Floats, delta: int) -> Floats:
        if not delta:
            return keys
        by = np.full(len(keys), delta, np.int64)
        turned: Floats = self._weights.architecture.rotaries[layer].turn(keys.astype(np.float64), by)
        return turned.astype(keys.dtype)

    def _parts(self, payload: bytes, n: int) -> list[tuple[Floats, Floats]]:
        shape, dtype = self._weights.architecture.shape, self._weights.dtype
        wide, high = shape.n_head_kv * shape.head_dim_k, shape.n_head_kv * shape.head_dim_v
        if len(payload) != shape.n_layer * n * (wide + high) * dtype.itemsize:
            raise StateRejected(f"saved state has {len(payload)} bytes, which is not {n} rows of this model")
        rows = np.frombuffer(payload, dtype).reshape(shape.n_layer, n * (wide + high))
        if not np.isfinite(rows).all():
            raise StateRejected("saved state holds values that are not finite")
        return [
            (
                layer[: n * wide].reshape(n, shape.n_head_kv, shape.head_dim_k),
                layer[n * wide :].reshape(n, shape.n_head_kv, shape.head_dim_v),
            )
            for layer in rows
        ]


class _Shown:
    """`LayerRows` of a probe: copies of some rows, one layer at a time, and the probe's own behind them."""

    def __init__(self, layers: tuple[PageStore, ...], positions: Positions) -> None:
        self._layers, self._positions = layers, positions

    def seen(self, layer: int, new: NewRows) -> Seen:
        positions, keys, values = self._layers[layer].rows(0, self._layers[layer].stop)
        shown = np.isin(positions, self._positions)
        store = PageStore(keys.shape[1], keys.shape[2], values.shape[2], keys.dtype)
        store.put(positions[shown], keys[shown], values[shown])
        store.put(new.positions, new.keys, new.values)
        return Seen(store.pages())


def _flat(rows: Floats) -> Floats:
    """`[n, n_head_kv, head_dim]` to `[n, n_head_kv * head_dim]`."""
    return rows.reshape(len(rows), rows.shape[1] * rows.shape[2])
