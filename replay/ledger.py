"""Every row of every layer, remembered: a row may come back only as the row that it was.

The first sight of a slot stores its keys and values. At every later sight the values must be equal, the keys equal
where the cache position is the same and equal after rotation where it moved. This is what catches an engine that is
right in layer 0 and wrong in layer k, has right keys and wrong values, or turns keys twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtape.backends.protocol import KvRows
from kvtape.backends.reference.model.rope import Rotary

__all__ = ["LedgerRows", "RowFault", "RowLedger"]

Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class LedgerRows:
    """Rows of distinct slots: `slots`, `positions` int64 `[n]`, and per layer `[n, width]` keys and values.

    `moves` int64 `[n]`: how often each was seen to have moved; None where nothing was seen before.
    """

    slots: Ints
    positions: Ints
    rows: KvRows
    moves: Ints | None = None

    def take(self, which: Ints) -> LedgerRows:
        keys = tuple(k[which] for k in self.rows.keys)
        values = tuple(v[which] for v in self.rows.values)
        moves = None if self.moves is None else self.moves[which]
        return LedgerRows(self.slots[which], self.positions[which], KvRows(keys, values), moves)


@dataclass(frozen=True, slots=True)
class RowFault:
    """`slots` whose keys or values in `layer` are not what they were; `worst` is a relative distance."""

    what: str
    layer: int
    slots: Ints
    worst: float


class RowLedger:
    """`see` compares and remembers. Rows are kept while their slot is in `reachable`, so memory follows the cache.

    Without `rotaries` (of each layer) the keys of moved rows are not compared, only their values.
    """

    def __init__(self, rotaries: Sequence[Rotary] | None, n_kv_heads: int, moved_tolerance: float) -> None:
        self._rotaries, self._n_kv_heads, self._moved_tolerance = rotaries, n_kv_heads, moved_tolerance
        self._current: LedgerRows | None = None
        self._away: list[LedgerRows] = []

    @property
    def n_rows(self) -> int:
        """How many rows are remembered."""
        return sum(len(batch.slots) for batch in self._batches())

    def see(self, now: LedgerRows, reachable: Ints) -> list[RowFault]:
        """The faults of the rows that an engine holds now, by batch and layer; then remember these rows."""
        faults: list[RowFault] = []
        moves = np.zeros(len(now.slots), np.int64)
        for batch in self._batches():
            _, before, after = np.intersect1d(batch.slots, now.slots, assume_unique=True, return_indices=True)
            if len(before):
                faults += self._compare(batch, before, now, after)
                earlier = 0 if batch.moves is None else batch.moves[before]
                moves[after] = earlier + (batch.positions[before] != now.positions[after])
        self._remember(replace(now, moves=moves), reachable)
        return faults

    @property
    def moves(self) -> Ints:
        """Of each row seen last, in its order: how often it had moved since it was first seen."""
        seen = self._current.moves if self._current is not None else None
        return np.zeros(0, np.int64) if seen is None else seen

    def _batches(self) -> list[LedgerRows]:
        return ([self._current] if self._current else []) + self._away

    def _compare(self, then: LedgerRows, before: Ints, now: LedgerRows, after: Ints) -> list[RowFault]:
        slots = now.slots[after]
        old, new = then.positions[before], now.positions[after]
        stayed, moved = np.flatnonzero(old == new), np.flatnonzero(old != new)
        faults: list[RowFault] = []
        for layer, (keys, values) in enumerate(zip(now.rows.keys, now.rows.values, strict=True)):
            key_then, key_now = _pick(then.rows.keys[layer], before), _pick(keys, after)
            value_then, value_now = _pick(then.rows.values[layer], before), _pick(values, after)
            faults += _unequal("values changed", layer, slots, value_then, value_now)
            faults += _unequal(
                "keys changed in place", layer, slots[stayed], _pick(key_then, stayed), _pick(key_now, stayed)
            )
            if len(moved) and self._rotaries is not None:
                turned = self._turn(self._rotaries[layer], key_then[moved], new[moved] - old[moved])
                faults += self._misturned(layer, slots[moved], turned, key_now[moved])
        return faults

    def _turn(self, rotary: Rotary, keys: Array, deltas: Ints) -> npt.NDArray[np.float64]:
        heads = keys.astype(np.float64).reshape(len(keys), self._n_kv_heads, -1)
        return rotary.turn(heads, deltas).reshape(len(keys), -1)

    def _misturned(self, layer: int, slots: Ints, want: Array, got: Array) -> list[RowFault]:
        apart = _relative(want, got)
        bad = ~(apart <= self._moved_tolerance)
        what = "moved keys are not the old keys turned by the shift"
        return [RowFault(what, layer, slots[bad], float(apart[bad].max()))] if bad.any() else []

    def _remember(self, now: LedgerRows, reachable: Ints) -> None:
        away: list[LedgerRows] = []
        for batch in self._batches():
            gone = ~np.isin(batch.slots, now.slots, assume_unique=True)
            keep = np.flatnonzero(gone & np.isin(batch.slots, reachable, assume_unique=True))
            if len(keep):
                away.append(batch if len(keep) == len(batch.slots) else batch.take(keep))
        self._current, self._away = now, away


def _pick(rows: Array, which: Ints) -> Array:
    """`rows[which]`, without a copy where `which` is one ascending run."""
    if len(which) and which[-1] - which[0] + 1 == len(which) and bool((np.diff(which) == 1).all()):
        return rows[which[0] : which[-1] + 1]
    return rows[which]


def _unequal(what: str, layer: int, slots: Ints, then: Array, now: Array) -> list[RowFault]:
    # By value, so that -0.0 is 0.0 (a rotation by nothing may turn one into the other) and NaN is never right.
    if then.shape == now.shape and np.array_equal(then, now):
        return []
    if then.shape != now.shape:
        return [RowFault(f"{what} (width {then.shape[1:]}, now {now.shape[1:]})", layer, slots, float("inf"))]
    bad = (then != now).any(axis=1) | np.isnan(now).any(axis=1)
    return [RowFault(what, layer, slots[bad], float(_relative(then[bad], now[bad]).max()))]


def _relative(want: Array, got: Array) -> npt.NDArray[np.float64]:
    """Distance of each row over the length of the wanted one; infinite where it is not a number."""
    wanted, gotten = want.astype(np.float64), got.astype(np.float64)
    length = np.maximum(np.linalg.norm(wanted, axis=1), np.finfo(np.float64).tiny)
    apart = np.linalg.norm(wanted - gotten, axis=1) / length
    return np.where(np.isfinite(apart), apart, np.inf)
