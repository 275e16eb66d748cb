"""`no-cache`: nothing is kept but the tokens; every step is a forward of them all. O(n^2), and the correctness oracle.

Contract: exact, bit-identical to `standard`: a row's bits do not depend on how many rows are computed beside it.

Memory: 4 bytes a token between steps. A step holds the rows of all layers while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvtape.backends.reference.engines.catalogue import EngineEntry
from kvtape.backends.reference.engines.engine import Contract, EngineInfo, Memory, MemoryKind
from kvtape.backends.reference.engines.session_engine import SessionEngine
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.ffn import FfnRouter
from kvtape.backends.reference.model.kv_rows import KvRows
from kvtape.backends.reference.model.tokens import Ids
from kvtape.backends.reference.model.weights import Weights
from kvtape.planner.grammar import OptionValue

__all__ = ["ENTRY", "NoCacheEngine"]


class NoCacheEngine(SessionEngine):
    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self._tokens: Ids = np.empty(0, np.int32)

    def memory(self) -> Memory:
        n = self._tokens.nbytes
        return Memory(len(self._tokens), 0, (MemoryKind("tokens", n, n),))

    def read_kv_row(self, layer: int, position: int) -> tuple[Floats, Floats] | None:
        """Always None: no row outlives the step that computed it."""
        self._check_layer(layer)
        return None

    def _begin(self, weights: Weights, ffn: FfnRouter, ids: Ids) -> Floats:
        hidden = self._advance(weights, ffn, ids, 0, KvRows(weights))[-1:]
        self._tokens = ids
        return hidden

    def _step(self, weights: Weights, ffn: FfnRouter, ids: Ids) -> Floats:
        tokens = np.concatenate([self._tokens, ids])
        hidden = self._advance(weights, ffn, tokens, 0, KvRows(weights))[-1:]
        self._tokens = tokens
        return hidden

    def _rewind(self) -> None:
        """Nothing to undo: the tokens are taken over last."""


def _make(info: EngineInfo, options: Mapping[str, OptionValue]) -> NoCacheEngine:
    return NoCacheEngine(info)


ENTRY = EngineEntry(
    name="no-cache",
    aliases={"none": "no-cache", "off": "no-cache"},
    options={},
    contract=Contract.EXACT,
    make=_make,
    about="a forward of the whole text for every token: the correctness oracle",
    quadratic=True,
)
