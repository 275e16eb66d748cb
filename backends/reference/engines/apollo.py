"""`apollo`: answers a question from a store of past windows instead of carrying their rows. A `RetrievalEngine`.

Contract: task level. It is judged by answers, never by distance from `standard`: rows of the context are not there. For
`bench` alone; whoever runs a session is refused by name, and never given another engine instead.

Ingesting cuts a context into windows of `WINDOW_TOKENS`. Of each it keeps the tokens, the boundary residual (the row of
the last token where it enters layer `layer`, the window computed by itself) and entries (`apollo_store`).

A question is routed to one window. Below `layer` its rows see each other alone; from there on they also see the
boundary row, which stands one position before them. Where the last row enters `layer`, a delta is added:

    coef * sum over the top_k tokens retrieved of share * unit(row of the token in the output matrix)

and so at every decoded token, with what the question and the answer so far retrieve: what has been said is not pushed
again. A failed call leaves the store and the session as they were.

Memory: 4 bytes a token, one residual row a window, 16 bytes an entry and at most `REACH` entries a token; keys and
values of the question and its answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvtape.backends.reference.engines.apollo_store import (
    WINDOW_TOKENS,
    ApolloStore,
    Retrieved,
    StoredWindow,
    entries_of,
)
from kvtape.backends.reference.engines.catalogue import EngineEntry
from kvtape.backends.reference.engines.engine import Contract, EngineInfo, Memory, MemoryKind
from kvtape.backends.reference.errors import EmptyPrompt, ExecutionRefused, RetrievalMiss
from kvtape.backends.reference.model.blas import Floats, one_blas_thread
from kvtape.backends.reference.model.dispatch import layer_step
from kvtape.backends.reference.model.ffn import FfnRouter
from kvtape.backends.reference.model.kv_rows import KvRows
from kvtape.backends.reference.model.steps import embed
from kvtape.backends.reference.model.tokens import Ids, checked_tokens
from kvtape.backends.reference.model.weights import Weights
from kvtape.planner.grammar import Option, OptionValue

__all__ = ["ENTRY", "ApolloEngine"]


class ApolloEngine:
    """`store`: what was ingested; `retrieved`: what the last call put in, None before a question. `coef` may be changed
    between any two calls.
    """

    def __init__(self, info: EngineInfo, layer: int = 30, coef: float = 10.0, top_k: int = 8) -> None:
        self.info = info
        self.retrieved: Retrieved | None = None
        self._layer, self.coef, self._top_k = layer, coef, top_k
        self.store = ApolloStore()
        self._weights: Weights | None = None
        self._rows: KvRows | None = None
        self._said: list[int] = []
        self._next = 0
        self._counts = {"windows_ingested": 0, "rows_computed": 0, "tokens_retrieved": 0}

    def ingest(self, weights: Weights, ffn: FfnRouter, tokens: Sequence[int]) -> None:
        """Raises EmptyPrompt, InputRejected, ExecutionRefused, and what `ffn` raises."""
        ids = self._checked(weights, tokens)
        parts = [ids[i : i + WINDOW_TOKENS] for i in range(0, len(ids), WINDOW_TOKENS)]
        windows = [StoredWindow(part, self._boundary(weights, ffn, part), entries_of(part)) for part in parts]
        self.store.add(windows)
        self._weights = weights
        self._counts["windows_ingested"] += len(windows)
        self._counts["rows_computed"] += len(ids)

    def query(self, weights: Weights, ffn: FfnRouter, tokens: Sequence[int]) -> Floats:
        ids = self._checked(weights, tokens)
        said = ids.tolist()
        found = self.store.retrieve(self.store.route(said), said, self._top_k)
        if not len(found.tokens):
            raise RetrievalMiss("nothing in the window follows a token of the question but its own tokens")
        window, rows = self.store.windows[found.window], KvRows(weights)
        start = len(window.tokens)
        hidden = self._through(weights, ffn, ids, start, rows, found, window.boundary[None])
        self._rows, self._said, self._next, self.retrieved = rows, said, start + len(ids), found
        self._count(found, len(ids))
        return hidden

    def decode_step(self, weights: Weights, ffn: FfnRouter, token: int) -> Floats:
        """Raises EmptyPrompt before a question. After an error of the router the identical token may be tried again."""
        ids = self._checked(weights, [token])
        if self._rows is None or self.retrieved is None:
            raise EmptyPrompt("decode_step before any question; query first")
        said = [*self._said, int(token)]
        found = self.store.retrieve(self.retrieved.window, said, self._top_k)
        rows, before = self._rows, self._next
        try:
            hidden = self._through(weights, ffn, ids, before, rows, found)
            self._said, self._next, self.retrieved = said, before + 1, found
        except BaseException:
            rows.truncate(before)
            raise
        self._count(found, 1)
        return hidden

    def memory(self) -> Memory:
        store, rows = self.store, self._rows
        kv = (rows.occupied_bytes, rows.allocated_bytes) if rows else (0, 0)
        held = rows.layers[-1].n_rows if rows else 0
        stored = {"tokens": store.token_bytes, "boundary": store.boundary_bytes, "entries": store.entry_bytes}
        kinds = [MemoryKind(kind, n, n, cold=True) for kind, n in stored.items()]
        return Memory(held, held, (MemoryKind("kv", *kv), *kinds))

    def stage_summary(self) -> Mapping[str, int]:
        return dict(self._counts)

    def _checked(self, weights: Weights, tokens: Sequence[int]) -> Ids:
        n_layer = weights.architecture.n_layer
        if self._layer >= n_layer:
            why = f"layer={self._layer} of a model whose layers are 0..{n_layer - 1}; give layer= among those"
            raise ExecutionRefused("unsupported", f"{self.info.name}: {why}")
        if self._weights is not None and weights is not self._weights:
            raise ExecutionRefused("binding_defect", f"{self.info.name}: the store was filled with other weights")
        return checked_tokens(tokens, weights.n_vocab)

    def _boundary(self, weights: Weights, ffn: FfnRouter, ids: Ids) -> Floats:
        """The last row of a window where it enters the injection layer, `[n_embd]`."""
        x, rows, positions = embed(weights, ids), KvRows(weights), np.arange(len(ids), dtype=np.int64)
        with one_blas_thread():
            for layer in range(self._layer):
                x = layer_step(weights, ffn, layer, x, positions, rows)
        last: Floats = x[-1].copy()
        return last

    def _through(
        self,
        weights: Weights,
        ffn: FfnRouter,
        ids: Ids,
        start: int,
        rows: KvRows,
        found: Retrieved,
        boundary: Floats | None = None,
    ) -> Floats:
        """The last row `[1, n_embd]` behind all layers. `boundary` `[1, n_embd]` joins at the injection layer."""
        x, positions = embed(weights, ids), np.arange(start, start + len(ids), dtype=np.int64)
        with one_blas_thread():
            for layer in range(weights.architecture.n_layer):
                if layer == self._layer:
                    x = np.concatenate([x[:-1], x[-1:] + self._delta(weights, found)])
                    if boundary is not None:
                        x, positions = np.concatenate([boundary, x]), np.concatenate([[start - 1], positions])
                x = layer_step(weights, ffn, layer, x, positions, rows)
        return x[-1:]

    def _delta(self, weights: Weights, found: Retrieved) -> Floats:
        """`[n_embd]`; zeros where nothing was retrieved."""
        rows = weights.head.matrix.rows(found.tokens)
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        units = rows / np.where(norms == 0, 1, norms)
        return np.asarray(self.coef * (found.shares[:, None] * units).sum(axis=0), weights.dtype)

    def _count(self, found: Retrieved, n_rows: int) -> None:
        self._counts["rows_computed"] += n_rows
        self._counts["tokens_retrieved"] += len(found.tokens)


def _make(info: EngineInfo, options: Mapping[str, OptionValue]) -> ApolloEngine:
    return ApolloEngine(info, int(options["layer"] or 0), float(options["coef"] or 0.0), int(options["top_k"] or 0))


ENTRY = EngineEntry(
    name="apollo",
    options={
        "layer": Option(int, 30, (0, None)),
        "coef": Option(float, 10.0, (0.0, None)),
        "top_k": Option(int, 8, (1, None)),
    },
    contract=Contract.TASK,
    make=_make,
    about="answers from past windows by retrieval and one delta; bench only",
    experimental=True,
    bench_only=True,
)
