"""Each layer's input rows in place of its keys and values, which follow from them: `key_values(layer, row, position)`.

    position   0 ............ cooled ................ stop
               cold: coded rows      hot: plain rows, and the keys and values that were made of them

Hot keys and values are a derivative: `forget_derived` drops them, and the next step makes them again, bit for bit.
Those of cold rows are made anew at every step, a layer at a time, from what the codec gives back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtape.backends.reference.engines.growing_rows import GrowingRows
from kvtape.backends.reference.engines.row_codecs import RowCodec
from kvtape.backends.reference.errors import ExecutionRefused
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.dispatch import NewRows, Seen
from kvtape.backends.reference.model.kv_rows import KvRows
from kvtape.backends.reference.model.pages import Pages, paged
from kvtape.backends.reference.model.steps import Positions, key_values
from kvtape.backends.reference.model.weights import Weights

__all__ = ["ResidualRows"]


class _Tiers:
    """Of one layer: `cold` coded rows from position 0 on, `hot` plain ones behind them."""

    def __init__(self, codec: RowCodec, no_rows: Floats) -> None:
        self.codec = codec
        self.cold = GrowingRows(codec.empty(no_rows.shape[1], no_rows.dtype))
        self.hot = GrowingRows(no_rows)

    @property
    def span(self) -> tuple[int, int]:
        """Positions of the first hot row, and behind the last."""
        return len(self.cold), len(self.cold) + len(self.hot)


class ResidualRows:
    """`codecs`: of each layer's cold rows. Weights are those of the session: rows of others would be other rows."""

    def __init__(self, weights: Weights, codecs: Sequence[RowCodec]) -> None:
        self._weights = weights
        no_rows = np.empty((0, weights.architecture.shape.n_embd), weights.dtype)
        self._layers = tuple(_Tiers(codec, no_rows) for codec in codecs)
        self._derived = KvRows(weights)

    def seen(self, layer: int, new: NewRows) -> Seen:
        """Raises ExecutionRefused where keys and values turn out not to follow from the rows that are kept."""
        tiers, derived = self._layers[layer], self._derived.layers[layer]
        if not any(tiers.span):
            self._prove(layer, new)
        first, stop = tiers.span
        if derived.n_rows < stop - first:
            derived.clear()
            derived.append(*self._made(layer, tiers.hot.view, first))
        tiers.hot.append(new.x)
        derived.append(new.positions, new.keys, new.values)
        return Seen(self._with_cold(layer) if first else derived.pages())

    def cool(self, stop: int) -> None:
        """Have the rows below position `stop` cold. A codec that fails changes nothing."""
        n = [max(0, stop - len(tiers.cold)) for tiers in self._layers]
        coded = [tiers.codec.encode(tiers.hot.view[:k]) for tiers, k in zip(self._layers, n, strict=True)]
        for tiers, derived, rows in zip(self._layers, self._derived.layers, coded, strict=True):
            tiers.cold.append(rows)
            tiers.hot.drop_first(len(rows))
            derived.drop_below(len(tiers.cold))

    def truncate(self, stop: int) -> None:
        """Take the hot rows at or past position `stop` out of every layer: also of those that a failed step reached."""
        self._derived.truncate(stop)
        for tiers in self._layers:
            tiers.hot.truncate(max(0, stop - len(tiers.cold)))

    def forget_derived(self) -> None:
        for derived in self._derived.layers:
            derived.clear()

    def row(self, layer: int, position: int) -> tuple[Floats, Floats] | None:
        """Key and value as attention reads them. Of a cold row, and of one whose derivative is gone: made now."""
        tiers = self._layers[layer]
        first, stop = tiers.span
        kept = self._derived.row(layer, position)
        if kept is not None or not 0 <= position < stop:
            return kept
        if position < first:
            rows = tiers.codec.decode(tiers.cold.view[position : position + 1], self._weights.dtype)
        else:
            rows = tiers.hot.view[position - first : position - first + 1]
        _, keys, values = self._made(layer, rows, position)
        return keys[0], values[0]

    @property
    def spans(self) -> frozenset[tuple[int, int]]:
        """`(first hot position, stop)` of the layers: one pair unless a step is under way, or failed."""
        return frozenset(tiers.span for tiers in self._layers)

    @property
    def n_underived(self) -> int:
        """Hot rows whose keys and values have to be made again, in whichever layer has most of them."""
        stores = self._derived.layers
        return max(len(tiers.hot) - store.n_rows for tiers, store in zip(self._layers, stores, strict=True))

    @property
    def hot(self) -> tuple[int, int]:
        """Bytes of plain rows, occupied and allocated."""
        return sum(t.hot.occupied_bytes for t in self._layers), sum(t.hot.allocated_bytes for t in self._layers)

    @property
    def cold(self) -> tuple[int, int]:
        """Bytes of coded rows, occupied and allocated."""
        return sum(t.cold.occupied_bytes for t in self._layers), sum(t.cold.allocated_bytes for t in self._layers)

    @property
    def derived(self) -> tuple[int, int]:
        """Bytes of the hot rows' keys and values, occupied and allocated."""
        return self._derived.occupied_bytes, self._derived.allocated_bytes

    def _with_cold(self, layer: int) -> Pages:
        """Of all rows of a layer. The pages live as long as that layer's step."""
        tiers = self._layers[layer]
        cold = tiers.codec.decode(tiers.cold.view, self._weights.dtype)
        at, keys, values = self._made(layer, cold, 0)
        hot_at, hot_keys, hot_values = self._derived.layers[layer].rows(*tiers.span)
        return paged(
            np.concatenate([at, hot_at]), np.concatenate([keys, hot_keys]), np.concatenate([values, hot_values])
        )

    def _made(self, layer: int, rows: Floats, first: int) -> tuple[Positions, Floats, Floats]:
        """Positions, keys and values of input rows that stand from position `first` on."""
        at = np.arange(first, first + len(rows), dtype=np.int64)
        return (at, *key_values(self._weights, layer, rows, at))

    def _prove(self, layer: int, new: NewRows) -> None:
        """That the last of the first rows gives the keys and values that the layer used: measured at every prefill."""
        keys, values = key_values(self._weights, layer, new.x[-1:], new.positions[-1:])
        same = np.array_equal(keys, new.keys[-1:], equal_nan=True)
        if not (same and np.array_equal(values, new.values[-1:], equal_nan=True)):
            raise ExecutionRefused(
                "unsupported", f"keys and values of layer {layer} do not follow from its input row and position alone"
            )
