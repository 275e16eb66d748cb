"""A KV engine of the catalogue as the carrier of a session: it begins, steps, is copied; no row is taken out of it.

Its rows stand at positions 0, 1, .. in the order in which they came. Every evict is a rebuild from the survivors.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import UnsupportedOperation, UsageError
from kvtape.backends.protocol import KvRows
from kvtape.backends.reference.engines.registry import EngineChoice, make_engine
from kvtape.backends.reference.engines.session_engine import SessionEngine
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.ffn import FfnRouter
from kvtape.backends.reference.model.tokens import Ids
from kvtape.backends.reference.model.weights import Weights
from kvtape.backends.reference.session.engine_bytes import engine_from_bytes, engine_to_bytes
from kvtape.backends.reference.session.mass import HeadSums

__all__ = ["EngineRows", "check_carries"]

Positions = npt.NDArray[np.int64]


def check_carries(choice: EngineChoice) -> None:
    """Raises UsageError for an engine that cannot carry a session whose every row is on the books."""
    engine = make_engine(choice)
    if not isinstance(engine, SessionEngine):
        raise UsageError(f"engine={choice.spec} answers from a store and carries no session; `kvtape bench` runs it")
    if engine.window_tokens is not None:
        raise UsageError(
            f"engine={choice.spec} lets rows go by itself, without an event; use an engine without a window, and a "
            "policy such as stream:sink=4,recent=508 to bound what is resident"
        )


class EngineRows:
    """A `Carrier`; see `carrier`."""

    def __init__(self, choice: EngineChoice, weights: Weights, router: FfnRouter) -> None:
        engine = make_engine(choice)
        assert isinstance(engine, SessionEngine), "check_carries comes first"
        self._choice, self._weights, self._router = choice, weights, router
        self._engine = engine
        self._n = 0

    @property
    def resident_bytes(self) -> int:
        return self._engine.memory().occupied_bytes if self._n else 0

    @property
    def allocated_bytes(self) -> int:
        return self._engine.memory().allocated_bytes if self._n else 0

    def fresh(self) -> EngineRows:
        return EngineRows(self._choice, self._weights, self._router)

    def compute(self, ids: Ids, at: int, sums: HeadSums | None) -> tuple[Floats, int]:
        if at != self._n:
            why = f"{self._choice.spec} computes at position {self._n} next, not at {at}; rebuild instead"
            raise UnsupportedOperation("computing between rows", why)
        if not self._n:
            hidden = self._engine.prefill(self._weights, self._router, ids.tolist())
            self._n = len(ids)
            return hidden, 1
        for token in ids:
            hidden = self._engine.decode_step(self._weights, self._router, int(token))
            self._n += 1
        return hidden, len(ids)

    def undo_point(self, start: int, stop: int) -> Callable[[], None]:
        n, saved = self._n, self._engine.snapshot() if self._n else None

        def undo() -> None:
            if saved is None:
                self._engine = self.fresh()._engine
            elif self._n != n:
                self._engine.restore(saved)
            self._n = n

        return undo

    def difference(self, positions: Positions) -> str | None:
        held = self._engine.handle().n_tokens if self._n else 0
        if held == len(positions) and np.array_equal(positions, np.arange(held)):
            return None
        return f"{self._choice.spec} stands behind {held} tokens, {len(positions)} are on the books"

    def witness(self, positions: Positions) -> tuple[Positions, KvRows]:
        """Row by row as attention would read it. Raises UnsupportedOperation where the engine has no such row."""
        shape = self._weights.architecture.shape
        keys, values = (
            np.zeros((shape.n_layer, len(positions), shape.n_head_kv * width), self._weights.dtype)
            for width in (shape.head_dim_k, shape.head_dim_v)
        )
        for layer in range(shape.n_layer):
            for i, position in enumerate(positions.tolist()):
                row = self._engine.read_kv_row(layer, position)
                if row is None:
                    raise UnsupportedOperation("witness", f"{self._choice.spec} holds no row at position {position}")
                keys[layer, i], values[layer, i] = row[0].ravel(), row[1].ravel()
        return positions.copy(), KvRows(tuple(keys), tuple(values))

    def save(self) -> bytes:
        return engine_to_bytes(self._engine.snapshot(), self._weights) if self._n else b""

    def loaded(self, payload: bytes, positions: Positions) -> EngineRows:
        rows = self.fresh()
        if payload:
            rows._engine.restore(engine_from_bytes(payload, self._weights))
            rows._n = len(positions)
        return rows
