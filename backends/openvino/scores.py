"""Attention that rows have received, kept row by row until it is taken.

A row's account begins when it enters the cache and ends when it leaves: what is evicted, truncated or cleared loses
its mass for good, and a row that is admitted, refilled or restored begins at zero. Shifted rows keep theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtape.backends.openvino.compiled import round_to
from kvtape.backends.openvino.mirror import Rows
from kvtape.backends.openvino.rope import F32, I64, Rotation
from kvtape.backends.protocol import AttentionMass

__all__ = ["EngineKeys", "MassAccount", "as_attention_mass"]

_GROW_ROWS = 256

F64 = npt.NDArray[np.float64]


@dataclass
class MassAccount:
    """`by_head` `[layers, heads, n]` of the rows at `tape` `[n]`, in their order; `n_queries` since the last take."""

    layers: int
    heads: int
    n_queries: int = 0
    tape: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    _room: F64 = field(init=False)

    def __post_init__(self) -> None:
        self._room = np.zeros((self.layers, self.heads, 0))

    @property
    def by_head(self) -> F64:
        return self._room[:, :, : len(self.tape)]

    def copy(self) -> MassAccount:
        other = MassAccount(self.layers, self.heads, self.n_queries)
        other.follow(self.tape)
        other.by_head[:] = self.by_head
        return other

    def extend(self, tape: I64) -> None:
        """Rows came behind those that are known: `tape` of all."""
        known = len(self.tape)
        if len(tape) > self._room.shape[2]:
            room = np.zeros((self.layers, self.heads, len(tape) + max(_GROW_ROWS, len(tape) // 4)))
            room[:, :, :known] = self.by_head
            self._room = room
        self._room[:, :, known : len(tape)] = 0
        self.tape = tape

    def follow(self, tape: I64) -> None:
        """Other rows, or the same in another order: those that stay keep their mass, others begin at zero."""
        _, new, old = np.intersect1d(tape, self.tape, assume_unique=True, return_indices=True)
        kept = self.by_head[:, :, old]
        self._room = np.zeros((self.layers, self.heads, len(tape)))
        self._room[:, :, new] = kept
        self.tape = tape

    def forget(self) -> None:
        """No rows any more; the queries were computed all the same."""
        self.follow(np.empty(0, np.int64))

    def take(self) -> AttentionMass:
        """All of it; counting begins anew."""
        taken = as_attention_mass(self.tape, range(self.layers), self.n_queries, self.by_head)
        self._room[:] = 0
        self.n_queries = 0
        return taken


class EngineKeys:
    """The keys of all rows as the engine holds them: at their cache positions, rounded to its storage type.

    Keys that stand where they were computed, stored as f32, are the host copy's. Others are worked out once and kept
    until `forget`, to be called whenever the rows change other than by new ones behind them.
    """

    def __init__(self, rotation: Rotation | None, kv_type: str) -> None:
        self._rotation = rotation
        self._kv_type = kv_type
        self._known = 0
        self._keys: F32 | None = None

    def forget(self) -> None:
        self._known = 0
        self._keys = None

    def of(self, rows: Rows) -> F32:
        """`[layers, n, kv_heads, head_dim]`; not to be written to."""
        if self._kv_type == "f32" and np.array_equal(rows.cache, rows.origin):
            return rows.keys
        n, known = len(rows), self._known
        keys = self._keys
        if keys is None or n > keys.shape[1]:
            keys = np.empty((rows.keys.shape[0], n + max(_GROW_ROWS, n // 4), *rows.keys.shape[2:]), np.float32)
            if self._keys is not None:
                keys[:, :known] = self._keys[:, :known]
            self._keys = keys
        keys[:, known:n] = round_to(rows.keys_in_place(self._rotation, known), self._kv_type)
        self._known = n
        return keys[:, :n]


def as_attention_mass(tape: I64, layers: Sequence[int], n_queries: int, by_head: F64) -> AttentionMass:
    """`by_head` `[layers, heads, n]` of the rows at `tape` `[n]`, in any order."""
    order = np.argsort(tape, kind="stable")
    ordered = by_head[:, :, order]
    mass = ordered.sum(axis=1).astype(np.float32)
    return AttentionMass(tape[order], tuple(layers), n_queries, mass, ordered.max(axis=1).astype(np.float32))
