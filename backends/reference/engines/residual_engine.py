"""What the engines that keep residual rows have in common; they differ in how cold rows are written.

A step's rows are hot until the whole step is done, and only then do rows that left the window grow cold, encoded for
all layers before the first is moved: a failed step finds every earlier row where it was, and can always be taken back.
"""

from __future__ import annotations

from kvtape.backends.reference.engines.codec_policy import CodecPolicy
from kvtape.backends.reference.engines.engine import EngineInfo, Memory, MemoryKind
from kvtape.backends.reference.engines.residual_rows import ResidualRows
from kvtape.backends.reference.engines.session_engine import SessionEngine
from kvtape.backends.reference.errors import InvariantViolation
from kvtape.backends.reference.model.blas import Floats, one_blas_thread
from kvtape.backends.reference.model.ffn import FfnRouter
from kvtape.backends.reference.model.tokens import Ids
from kvtape.backends.reference.model.weights import Weights

__all__ = ["ResidualEngine"]


class ResidualEngine(SessionEngine):
    """`window`: rows that stay hot, 0 for all. `policy`: how the others are written."""

    def __init__(self, info: EngineInfo, window: int, policy: CodecPolicy) -> None:
        super().__init__(info)
        self._window = window
        self._policy = policy
        self._rows: ResidualRows | None = None

    def memory(self) -> Memory:
        """Kinds: `residual`, hot rows; `derived kv`, made of them; `cold residual`, as codecs write it."""
        rows = self._rows
        none = (0, 0)
        kinds = (
            MemoryKind("residual", *(rows.hot if rows else none)),
            MemoryKind("derived kv", *(rows.derived if rows else none)),
            MemoryKind("cold residual", *(rows.cold if rows else none), cold=True),
        )
        return Memory(self._n_tokens, self._n_tokens, kinds)

    def read_kv_row(self, layer: int, position: int) -> tuple[Floats, Floats] | None:
        self._check_layer(layer)
        with one_blas_thread():
            return self._rows.row(layer, position) if self._rows else None

    def forget_derived(self) -> None:
        """Drop the keys and values kept beside hot rows. The next step makes them again, the same to the bit."""
        if self._rows:
            self._rows.forget_derived()

    def _begin(self, weights: Weights, ffn: FfnRouter, ids: Ids) -> Floats:
        rows = ResidualRows(weights, self._policy.of(weights.architecture.n_layer))
        hidden = self._advance(weights, ffn, ids, 0, rows)[-1:]
        self._cool(rows, 0, len(ids))
        self._rows = rows
        return hidden

    def _step(self, weights: Weights, ffn: FfnRouter, ids: Ids) -> Floats:
        assert self._rows is not None
        self._count("rows_recomputed", self._n_cold(self._n_tokens) + self._rows.n_underived)
        hidden = self._advance(weights, ffn, ids, self._n_tokens, self._rows)
        self._cool(self._rows, self._n_tokens, self._n_tokens + 1)
        return hidden

    def _rewind(self) -> None:
        assert self._rows is not None
        self._rows.truncate(self._n_tokens)
        expected = (self._n_cold(self._n_tokens), self._n_tokens)
        if self._rows.spans != {expected}:
            raise InvariantViolation(f"layers have hot rows at {sorted(self._rows.spans)} and not at {expected}")

    def _obstacle(self, weights: Weights) -> str | None:
        arch = weights.architecture
        if arch.history:
            return f"the model has {' and '.join(arch.history)}: keys and values do not follow from residual rows alone"
        return self._policy.obstacle(arch.n_layer, arch.shape.n_embd)

    def _n_cold(self, n_tokens: int) -> int:
        return max(0, n_tokens - self._window) if self._window else 0

    def _cool(self, rows: ResidualRows, before: int, n_tokens: int) -> None:
        n_cold = self._n_cold(n_tokens)
        if n_cold:
            rows.cool(n_cold)
            self._count("rows_cooled", n_cold - self._n_cold(before))
