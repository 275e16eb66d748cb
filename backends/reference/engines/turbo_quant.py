"""`turbo-quant`: keys and values of every layer at 4 or 3 bits a component, as `turbo_codec` codes them.

Contract: codec bounded. The mean cosine of a decoded row with the row that was encoded is at least .995 at 4 bits and
.982 at 3. A prompt attends to its own rows as they were computed, so a prefill is bit-identical to `standard`; a new
row attends to decoded rows and, exactly, to itself. A row is encoded once, and its codes are appended when its step is
whole; a failed step has appended nothing, so the identical token can be tried again.

Memory: `4 + ceil(d * bits / 8)` bytes for each block of d components of a key or a value row. In blocks of 256 at
4 bits that is 3.9 times less than f16 rows and 7.8 times less than f32 rows: two figures, never one. Decoded rows live
for the attention of one layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kvtape.backends.reference.engines.catalogue import EngineEntry
from kvtape.backends.reference.engines.code_store import CodeStore
from kvtape.backends.reference.engines.engine import Contract, EngineInfo, Memory, MemoryKind
from kvtape.backends.reference.engines.session_engine import SessionEngine
from kvtape.backends.reference.engines.turbo_codec import BLOCK_SIZES, BlockCodec, Coded, block_size
from kvtape.backends.reference.errors import InvariantViolation
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.dispatch import NewRows, Seen
from kvtape.backends.reference.model.ffn import FfnRouter
from kvtape.backends.reference.model.pages import paged
from kvtape.backends.reference.model.tokens import Ids
from kvtape.backends.reference.model.weights import Weights
from kvtape.planner.grammar import Option, OptionValue

__all__ = ["ENTRY", "TurboQuantEngine"]

FLOORS = {4: 0.995, 3: 0.982}
"""Mean cosine of decoded rows that the contract promises, by bits."""


class TurboQuantEngine(SessionEngine):
    def __init__(self, info: EngineInfo, bits: int = 4) -> None:
        super().__init__(info)
        self.bits = bits
        self._rows: CodedRows | None = None

    def memory(self) -> Memory:
        if self._rows is None:
            return Memory(0, 0, (MemoryKind("codes", 0, 0),))
        kind = MemoryKind("codes", self._rows.occupied_bytes, self._rows.allocated_bytes)
        return Memory(self._n_tokens, self._rows.n_rows, (kind,))

    def read_kv_row(self, layer: int, position: int) -> tuple[Floats, Floats] | None:
        """Decoded: what attention reads from the next step on."""
        self._check_layer(layer)
        return self._rows.row(layer, position) if self._rows else None

    def ratio_to(self, float_bytes: int) -> float:
        """How many times smaller the codes are than rows of floats of 2 (f16) or 4 (f32) bytes."""
        self._check_layer(0)
        assert self._rows is not None
        return self._rows.n_components * float_bytes / self._rows.row_bytes

    def _begin(self, weights: Weights, ffn: FfnRouter, ids: Ids) -> Floats:
        rows = CodedRows(weights, self.bits)
        hidden = self._advance(weights, ffn, ids, 0, rows)[-1:]
        self._commit(rows, len(ids))
        self._rows = rows
        return hidden

    def _step(self, weights: Weights, ffn: FfnRouter, ids: Ids) -> Floats:
        assert self._rows is not None
        hidden = self._advance(weights, ffn, ids, self._n_tokens, self._rows)
        self._commit(self._rows, 1)
        return hidden

    def _rewind(self) -> None:
        assert self._rows is not None
        self._rows.forget()
        if any(n != self._n_tokens for n in self._rows.rows_of_layers):
            raise InvariantViolation(f"a layer does not hold {self._n_tokens} encoded rows")

    def _commit(self, rows: CodedRows, n: int) -> None:
        rows.commit()
        self._count("rows_encoded", n)

    def _obstacle(self, weights: Weights) -> str | None:
        shape = weights.architecture.shape
        for name, dim in (("key", shape.head_dim_k), ("value", shape.head_dim_v)):
            if block_size(shape.n_head_kv * dim) is None:
                sizes = ", ".join(map(str, BLOCK_SIZES))
                return f"a {name} row has {shape.n_head_kv * dim} components, which no block of {sizes} divides"
        return None


class CodedRows:
    """One store of keys and one of values a layer, and the codes of the step under way, which are not appended yet."""

    def __init__(self, weights: Weights, bits: int) -> None:
        shape = weights.architecture.shape
        self._n_heads, self._dtype = shape.n_head_kv, weights.dtype
        self._keys = tuple(_store(shape.n_head_kv * shape.head_dim_k, bits) for _ in range(shape.n_layer))
        self._values = tuple(_store(shape.n_head_kv * shape.head_dim_v, bits) for _ in range(shape.n_layer))
        self._new: list[tuple[Coded, Coded]] = []

    def seen(self, layer: int, new: NewRows) -> Seen:
        """The new rows exact, those before them decoded. Raises InvariantViolation for rows that cannot be encoded."""
        try:
            self._new.append((self._keys[layer].encode(_flat(new.keys)), self._values[layer].encode(_flat(new.values))))
        except ValueError as err:
            raise InvariantViolation(f"layer {layer}: {err}") from None
        if not self.n_rows:
            return Seen(paged(new.positions, new.keys, new.values))
        keys, values = self._decoded(layer, 0, self.n_rows)
        positions = np.concatenate([np.arange(self.n_rows, dtype=np.int64), new.positions])
        return Seen(paged(positions, np.concatenate([keys, new.keys]), np.concatenate([values, new.values])))

    def commit(self) -> None:
        """Append the codes of the step, which must have passed through every layer."""
        if len(self._new) != len(self._keys):
            raise InvariantViolation(f"{len(self._new)} of {len(self._keys)} layers have rows to append")
        for layer, (keys, values) in enumerate(self._new):
            self._keys[layer].append(keys)
            self._values[layer].append(values)
        self._new = []

    def forget(self) -> None:
        self._new = []

    def row(self, layer: int, position: int) -> tuple[Floats, Floats] | None:
        if not 0 <= position < self.n_rows:
            return None
        keys, values = self._decoded(layer, position, position + 1)
        return keys[0], values[0]

    @property
    def n_rows(self) -> int:
        return self._keys[0].n_rows

    @property
    def rows_of_layers(self) -> tuple[int, ...]:
        return tuple(store.n_rows for store in (*self._keys, *self._values))

    @property
    def n_components(self) -> int:
        """Of a key and a value row of one layer."""
        return self._keys[0].codec.kv_dim + self._values[0].codec.kv_dim

    @property
    def row_bytes(self) -> int:
        return self._keys[0].codec.row_bytes + self._values[0].codec.row_bytes

    @property
    def occupied_bytes(self) -> int:
        return sum(store.occupied_bytes for store in (*self._keys, *self._values))

    @property
    def allocated_bytes(self) -> int:
        return sum(store.allocated_bytes for store in (*self._keys, *self._values))

    def _decoded(self, layer: int, start: int, stop: int) -> tuple[Floats, Floats]:
        """`[n, n_head_kv, head_dim]` of rows `[start, stop)` in the float type of the model."""
        keys, values = (store.decoded(start, stop) for store in (self._keys[layer], self._values[layer]))
        return (
            keys.reshape(len(keys), self._n_heads, -1).astype(self._dtype),
            values.reshape(len(values), self._n_heads, -1).astype(self._dtype),
        )


def _flat(rows: Floats) -> Floats:
    return rows.reshape(len(rows), -1)


def _store(kv_dim: int, bits: int) -> CodeStore:
    size = block_size(kv_dim)
    assert size is not None
    return CodeStore(BlockCodec(kv_dim, size, bits))


def _make(info: EngineInfo, options: Mapping[str, OptionValue]) -> TurboQuantEngine:
    bits = int(options["bits"] or 0)
    return TurboQuantEngine(replace(info, bound=FLOORS[bits]), bits)


ENTRY = EngineEntry(
    name="turbo-quant",
    aliases={"tq4": "turbo-quant:bits=4", "tq3": "turbo-quant:bits=3"},
    options={"bits": Option(int, 4, (3, 4))},
    contract=Contract.CODEC_BOUNDED,
    make=_make,
    about="keys and values at 4 or 3 bits a component",
)
