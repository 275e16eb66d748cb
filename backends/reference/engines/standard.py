"""`standard`: keys and values of every layer, as computed. The engine that all others are held against.

Contract: exact. Without a window every query sees every row before it. With `window=N`, exact in the window: a query
attends to exactly N rows, itself included, and N rows are held between steps; under `window_rule=legacy` it attends to
the N rows held and to itself, N + 1. Rows leave only once a step is whole, so that a failed step can be taken back.

Memory: 2 * n_head_kv * head_dim * float bytes a row and layer, in pages of `pages.PAGE` rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvtape.backends.reference.engines.catalogue import EngineEntry
from kvtape.backends.reference.engines.engine import Contract, EngineInfo, Memory, MemoryKind
from kvtape.backends.reference.engines.session_engine import SessionEngine
from kvtape.backends.reference.errors import InvariantViolation
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.ffn import FfnRouter
from kvtape.backends.reference.model.kv_rows import KvRows
from kvtape.backends.reference.model.tokens import Ids
from kvtape.backends.reference.model.weights import Weights
from kvtape.planner.grammar import Option, OptionValue

__all__ = ["ENTRY", "StandardEngine"]


class StandardEngine(SessionEngine):
    """`window` 0 for none; `sees` rows are attended to then, `window` are held."""

    def __init__(self, info: EngineInfo, window: int = 0, *, legacy: bool = False) -> None:
        super().__init__(info)
        self._held = window
        self._sees = window + 1 if window and legacy else window
        self._rows: KvRows | None = None

    @property
    def window_tokens(self) -> int | None:
        return self._sees or None

    def memory(self) -> Memory:
        if self._rows is None:
            return Memory(0, 0, (MemoryKind("kv", 0, 0),))
        reachable = min(self._n_tokens, self._sees) if self._sees else self._n_tokens
        kind = MemoryKind("kv", self._rows.occupied_bytes, self._rows.allocated_bytes)
        return Memory(reachable, self._rows.n_rows, (kind,))

    def read_kv_row(self, layer: int, position: int) -> tuple[Floats, Floats] | None:
        self._check_layer(layer)
        return self._rows.row(layer, position) if self._rows else None

    def _begin(self, weights: Weights, ffn: FfnRouter, ids: Ids) -> Floats:
        rows = KvRows(weights, self._sees)
        hidden = self._advance(weights, ffn, ids, 0, rows)[-1:]
        self._slide(rows, len(ids))
        self._rows = rows
        return hidden

    def _step(self, weights: Weights, ffn: FfnRouter, ids: Ids) -> Floats:
        assert self._rows is not None
        hidden = self._advance(weights, ffn, ids, self._n_tokens, self._rows)
        self._slide(self._rows, self._n_tokens + 1)
        return hidden

    def _rewind(self) -> None:
        assert self._rows is not None
        self._rows.truncate(self._n_tokens)
        expected = min(self._n_tokens, self._held) if self._held else self._n_tokens
        if any(layer.n_rows != expected for layer in self._rows.layers):
            raise InvariantViolation(f"a layer does not hold {expected} rows after {self._n_tokens} tokens")

    def _slide(self, rows: KvRows, n_tokens: int) -> None:
        if self._held and n_tokens > self._held:
            rows.drop_below(n_tokens - self._held)


def _make(info: EngineInfo, options: Mapping[str, OptionValue]) -> StandardEngine:
    window = int(options["window"] or 0)
    if window:
        info = replace(info, contract=Contract.EXACT_IN_WINDOW)
    return StandardEngine(info, window, legacy=options["window_rule"] == "legacy")


ENTRY = EngineEntry(
    name="standard",
    aliases={"full": "standard", "fp32": "standard"},
    options={
        "window": Option(int, None, (1, None)),
        "window_rule": Option(str, "exact", ("exact", "legacy")),
    },
    contract=Contract.EXACT,
    make=_make,
    about="keys and values of every layer, the reference of all others",
)
