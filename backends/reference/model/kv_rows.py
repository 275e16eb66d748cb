"""Keys and values of every layer, as the layers computed them: the plainest thing an engine can keep."""

from __future__ import annotations

from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.dispatch import NewRows, Seen
from kvtape.backends.reference.model.pages import PageStore
from kvtape.backends.reference.model.weights import Weights

__all__ = ["KvRows"]


class KvRows:
    """One `PageStore` a layer. `window` is the engine's: rows outside are hidden from queries, and may be dropped."""

    def __init__(self, weights: Weights, window: int = 0) -> None:
        shape = weights.architecture.shape
        self.window = window
        self.layers = tuple(
            PageStore(shape.n_head_kv, shape.head_dim_k, shape.head_dim_v, weights.dtype) for _ in range(shape.n_layer)
        )

    def seen(self, layer: int, new: NewRows) -> Seen:
        store = self.layers[layer]
        store.append(new.positions, new.keys, new.values)
        return Seen(store.pages(), self.window)

    def truncate(self, stop: int) -> None:
        """Take every row at or past position `stop` out of every layer: also of those that a failed step reached."""
        for store in self.layers:
            store.truncate(stop)

    def drop_below(self, start: int) -> None:
        for store in self.layers:
            store.drop_below(start)

    def row(self, layer: int, position: int) -> tuple[Floats, Floats] | None:
        return self.layers[layer].row(position)

    @property
    def stops(self) -> tuple[int, ...]:
        """One past the last position of each layer: equal unless a step is under way, or failed."""
        return tuple(store.stop for store in self.layers)

    @property
    def n_rows(self) -> int:
        """Of one layer; all have as many between steps."""
        return self.layers[0].n_rows

    @property
    def occupied_bytes(self) -> int:
        return sum(store.n_rows * store.row_bytes for store in self.layers)

    @property
    def allocated_bytes(self) -> int:
        return sum(store.allocated_bytes for store in self.layers)
