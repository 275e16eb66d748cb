"""Bytes of a llama.cpp session, by the geometry of its model: what its caches take, and what its rows take of them."""

from __future__ import annotations

from typing import Final

from kvtape.backends.asked import CONTEXT_PADDING
from kvtape.backends.books import Books
from kvtape.backends.fit import Need
from kvtape.backends.llama.context import ContextParams
from kvtape.capacity.allocation import CacheSettings
from kvtape.capacity.engines import Sizing
from kvtape.capacity.geometry import LayerKind
from kvtape.capacity.llama_rules import llama_rule
from kvtape.capacity.model import ModelShape

__all__ = ["CacheBytes", "session_need"]

_SEQUENCES: Final = 2
_MASS_BYTES: Final = 8
_LOG_ROUNDING: Final = 3 * 2**20 // 100
"""The engine logs a buffer for each of at most three caches (full, windowed, states), to 0.005 MiB up or down."""


def session_need(shape: ModelShape, params: ContextParams, *, scores: bool) -> Need:
    """What a session takes at an effective context; the native context has one padding unit more."""
    sizing = _sizing(shape, params)
    heads = max(1, shape.n_head)

    def attention(n_ctx: int) -> int:
        cells = n_ctx + CONTEXT_PADDING
        # Of `auto` nobody knows yet: the larger.
        weights = 0 if params.flash_attention == "on" else cells * params.n_ubatch * heads * 4
        # Sums by head, float64: of the running operation, of the cells, of the rows by tape position.
        return weights + (3 * cells * shape.n_layer * heads * _MASS_BYTES if scores else 0)

    return Need(shape.weights_bytes, lambda n_ctx: sizing.peak_bytes(n_ctx + CONTEXT_PADDING), attention)


class CacheBytes:
    """Bytes of one open session's caches."""

    def __init__(self, shape: ModelShape, params: ContextParams, logged: int) -> None:
        """`logged` is what the engine says it allocated, rounded to 0.01 MiB a cache: the truth, where ours differs."""
        ours = _sizing(shape, params).total_bytes(params.n_ctx)
        self.allocated = ours if abs(ours - logged) <= _LOG_ROUNDING else logged
        self._each = self._fixed = 0
        self._windowed: list[tuple[int, int]] = []
        for group in shape.geometry.stored_as(params.type_k, params.type_v).groups:
            row = group.count * (group.k_row_bytes + group.v_row_bytes)
            if group.kind is LayerKind.RECURRENT:
                self._fixed += row
            elif group.is_windowed:
                self._windowed.append((group.window, row))
            elif group.kind is not LayerKind.SHARED:
                self._each += row

    def resident(self, books: Books) -> int:
        """The rows in use: of windowed layers those in the last window, of recurrent ones the one state."""
        if not books.n_rows:
            return 0
        total = books.n_rows * self._each + self._fixed
        if self._windowed:
            positions = books.cache_positions()
            last = int(positions.max())
            total += sum(int((positions > last - window).sum()) * row for window, row in self._windowed)
        return total


def _sizing(shape: ModelShape, params: ContextParams) -> Sizing:
    settings = CacheSettings(
        slots=_SEQUENCES,
        unified=True,
        n_batch=params.n_batch,
        n_ubatch=params.n_ubatch,
        flash_attention=params.flash_attention != "off",
        swa_full=params.swa_full,
    )
    return Sizing(shape.geometry.stored_as(params.type_k, params.type_v), llama_rule(), settings)
