"""Attention that rows have received, kept row by row until it is taken.

A row's account begins when it enters the cache and ends when it leaves: what is evicted, truncated or cleared loses
its mass for good, and a row that is admitted, refilled or restored begins at zero. Shifted rows keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvtape.backends.openvino.attention import head_mass
from kvtape.backends.openvino.mirror import Rows
from kvtape.backends.openvino.rope import F32, I64, Rotation
from kvtape.backends.openvino.storage import Storage
from kvtape.backends.protocol import AttentionMass

__all__ = ["EngineKeys", "MassAccount", "Waiting", "as_attention_mass"]

_GROW_ROWS = 256

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Queries `[layers, T, heads, head_dim]` at cache `positions` `[T]`, whose attention is not worked out yet."""

    queries: F32
    positions: I64


@dataclass(frozen=True, slots=True)
class MassAccount:
    """`by_head` `[layers, heads, n]` of the rows at `tape` `[n]`, from `n_queries` queries; others are still waiting.

    Immutable like `mirror.Rows`: undoing an operation is taking the old one. Queries wait because a pass over the keys
    costs as much for 1 of them as for 32. Rows that come behind meanwhile are hidden from them by position, so waiting
    changes nothing as long as no row leaves, moves or comes in between: `settled` goes before that.
    """

    by_head: F64
    tape: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    n_queries: int = 0
    waiting: tuple[Waiting, ...] = ()

    @classmethod
    def empty(cls, layers: int, heads: int) -> MassAccount:
        return cls(np.zeros((layers, heads, 0)))

    @property
    def n_waiting(self) -> int:
        return sum(len(some.positions) for some in self.waiting)

    @property
    def furthest_waiting(self) -> int:
        """The largest cache position of a query that waits; -1 when none does."""
        return max((int(some.positions.max()) for some in self.waiting), default=-1)

    def with_queries(self, queries: F32, positions: I64) -> MassAccount:
        return replace(self, waiting=(*self.waiting, Waiting(queries, positions)))

    def settled(self, rows: Rows, keys: F32, check: Callable[[], None]) -> MassAccount:
        """Nothing waiting any more. `keys` are those of `rows` in place; `check` is called before each layer."""
        if not self.waiting:
            return self
        positions = np.concatenate([some.positions for some in self.waiting])
        by_head = np.zeros((*self.by_head.shape[:2], len(rows)))
        by_head[:, :, : len(self.tape)] = self.by_head
        for layer, sums in enumerate(by_head):
            check()
            queries = np.concatenate([some.queries[layer] for some in self.waiting])
            sums += head_mass(queries, keys[layer], positions, rows.cache)
        return MassAccount(by_head, rows.tape, self.n_queries + len(positions))

    def following(self, tape: I64) -> MassAccount:
        """Other rows, or the same in another order: those that stay keep their mass, others begin at zero."""
        _, new, old = np.intersect1d(tape, self.tape, assume_unique=True, return_indices=True)
        by_head = np.zeros((*self.by_head.shape[:2], len(tape)))
        by_head[:, :, new] = self.by_head[:, :, old]
        return MassAccount(by_head, tape, self.n_queries)

    def without_rows(self) -> MassAccount:
        """No rows any more; the queries were computed all the same."""
        empty = MassAccount.empty(*self.by_head.shape[:2])
        return replace(empty, n_queries=self.n_queries + self.n_waiting)

    def taken(self) -> AttentionMass:
        return as_attention_mass(self.tape, range(len(self.by_head)), self.n_queries, self.by_head)


class EngineKeys:
    """The keys of all rows as the engine holds them: at their cache positions, rounded to its storage type.

    Keys that stand where they were computed, kept to the bit, are the host copy's. Others are worked out once and kept
    until `forget`, to be called whenever the rows change other than by new ones behind them.
    """

    def __init__(self, rotation: Rotation | None, storage: Storage) -> None:
        self._rotation = rotation
        self._storage = storage
        self._known = 0
        self._keys: F32 | None = None

    def forget(self) -> None:
        self._known = 0
        self._keys = None

    def of(self, rows: Rows) -> F32:
        """`[layers, n, kv_heads, head_dim]`; not to be written to."""
        if self._storage.keeps_every_bit and np.array_equal(rows.cache, rows.origin):
            return rows.keys
        n, known = len(rows), self._known
        keys = self._keys
        if keys is None or n > keys.shape[1]:
            keys = np.empty((rows.keys.shape[0], n + max(_GROW_ROWS, n // 4), *rows.keys.shape[2:]), np.float32)
            if self._keys is not None:
                keys[:, :known] = self._keys[:, :known]
            self._keys = keys
        keys[:, known:n] = self._storage.stored(rows.keys_in_place(self._rotation, known))
        self._known = n
        return keys[:, :n]


def as_attention_mass(tape: I64, layers: Sequence[int], n_queries: int, by_head: F64) -> AttentionMass:
    """`by_head` `[layers, heads, n]` of the rows at `tape` `[n]`, in any order."""
    order = np.argsort(tape, kind="stable")
    ordered = by_head[:, :, order]
    mass = ordered.sum(axis=1).astype(np.float32)
    return AttentionMass(tape[order], tuple(layers), n_queries, mass, ordered.max(axis=1).astype(np.float32))
