"""The session's rows: its books (which token stands where) and the host's exact copy of their keys and values.

    row (storage order)   0  1  2  3  4
    tape                  0  1  6  7  8      position on the session's tape
    cache                 0  1  2  3  4      position RoPE sees now
    origin                0  1  6  7  8      position at which the stored key was computed

Keys are kept as the engine gave them and are rotated from `origin` to `cache` whenever the engine needs them, so
errors of many small rotations never add up. `Rows` values are immutable; undoing an operation is taking the old one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvtape.backends.openvino.rope import F32, I64, Rotation
from kvtape.planner.layout import Layout, Segment, normalise

__all__ = ["KvBuffer", "Rows"]

_GROW_ROWS = 256


class KvBuffer:
    """`keys` `[layers, capacity, kv_heads, head_dim_k]` and `values` likewise; the first `used` rows are taken."""

    __slots__ = ("keys", "used", "values")

    def __init__(self, keys: F32, values: F32, used: int) -> None:
        self.keys = keys
        self.values = values
        self.used = used

    def taken(self, index: npt.NDArray[np.intp]) -> KvBuffer:
        """A buffer of its own with the rows at `index`, and room to grow."""
        n = len(index)
        keys, values = _room(self.keys, n), _room(self.values, n)
        keys[:, :n] = self.keys[:, index]
        values[:, :n] = self.values[:, index]
        return KvBuffer(keys, values, n)

    def extended(self, n: int, keys: F32, values: F32) -> KvBuffer:
        """The first `n` rows and the new ones behind them; in place where nobody else wrote behind row `n`."""
        total = n + keys.shape[1]
        target = self
        if self.used != n or total > self.keys.shape[1]:
            target = KvBuffer(_room(self.keys, total), _room(self.values, total), n)
            target.keys[:, :n] = self.keys[:, :n]
            target.values[:, :n] = self.values[:, :n]
        target.keys[:, n:total] = keys
        target.values[:, n:total] = values
        target.used = total
        return target


def _room(like: F32, n: int) -> F32:
    """An array for `n` rows and some to come, of the kind of `like`."""
    return np.empty((like.shape[0], n + max(_GROW_ROWS, n // 4), *like.shape[2:]), np.float32)


def _no_rows() -> I64:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Rows:
    """All arrays `[n]` in storage order, which is cache order between operations. `kv` None: no host copy is kept."""

    kv: KvBuffer | None
    tape: I64 = field(default_factory=_no_rows)
    cache: I64 = field(default_factory=_no_rows)
    tokens: I64 = field(default_factory=_no_rows)
    origin: I64 = field(default_factory=_no_rows)

    @classmethod
    def empty(cls, layers: int, kv_heads: int, head_dim_k: int, head_dim_v: int, *, mirror: bool) -> Rows:
        def zeros(width: int) -> F32:
            return np.zeros((layers, 0, kv_heads, width), np.float32)

        return cls(KvBuffer(zeros(head_dim_k), zeros(head_dim_v), 0) if mirror else None)

    def __len__(self) -> int:
        return len(self.tape)

    @property
    def next_cache_position(self) -> int:
        """One past the largest in use; 0 in an empty cache."""
        return int(self.cache.max()) + 1 if len(self) else 0

    @property
    def in_cache_order(self) -> bool:
        return bool((np.diff(self.cache) > 0).all())

    @property
    def keys(self) -> F32:
        """`[layers, n, kv_heads, head_dim]` as computed, at `origin`."""
        return self._buffer().keys[:, : len(self)]

    @property
    def values(self) -> F32:
        return self._buffer().values[:, : len(self)]

    def keys_in_place(self, rotation: Rotation | None, start: int = 0) -> F32:
        """The keys of the rows from `start` on, at their cache positions: without a rotation, the origins."""
        delta = (self.cache - self.origin)[start:]
        if rotation is None:
            if delta.any():
                raise AssertionError("rows were moved although their rotation is unknown")
            return self.keys[:, start:]
        return rotation.apply(self.keys[:, start:], delta)

    def layout(self) -> Layout:
        """Maximal runs that are contiguous in tape and cache."""
        if not len(self):
            return ()
        order = np.argsort(self.cache, kind="stable")
        tape, cache = self.tape[order], self.cache[order]
        breaks = np.flatnonzero((np.diff(tape) != 1) | (np.diff(cache) != 1)) + 1
        bounds = [0, *(int(b) for b in breaks), len(self)]
        return normalise(Segment(int(tape[a]), b - a, int(cache[a])) for a, b in pairwise(bounds))

    def run(self, start: int, stop: int) -> slice | None:
        """Storage slice of the tape positions `[start, stop)`; None unless they are one run in tape and cache."""
        first = np.flatnonzero(self.tape == start)
        if not first.size or start >= stop:
            return None
        at = slice(int(first[0]), int(first[0]) + stop - start)
        tape, cache = self.tape[at], self.cache[at]
        whole = len(tape) == stop - start and (np.diff(tape) == 1).all() and (np.diff(cache) == 1).all()
        return at if whole else None

    def append(self, tape: I64, cache: I64, tokens: I64, keys: F32, values: F32) -> Rows:
        """Freshly computed rows behind the last; `keys`, `values` `[layers, k, kv_heads, head_dim]`."""
        buffer = None if self.kv is None else self.kv.extended(len(self), keys, values)
        return Rows(
            buffer,
            np.concatenate([self.tape, tape]),
            np.concatenate([self.cache, cache]),
            np.concatenate([self.tokens, tokens]),
            np.concatenate([self.origin, cache]),
        )

    def take(self, index: npt.NDArray[np.intp]) -> Rows:
        """The rows at `index`, in that order."""
        kv = None if self.kv is None else self.kv.taken(index)
        return Rows(kv, self.tape[index], self.cache[index], self.tokens[index], self.origin[index])

    def without(self, at: slice) -> Rows:
        return self.take(np.delete(np.arange(len(self)), at))

    def at_cache(self, cache: I64) -> Rows:
        """The same rows at other cache positions, in the order of those."""
        return replace(self, cache=cache).sorted()

    def sorted(self) -> Rows:
        return self if self.in_cache_order else self.take(np.argsort(self.cache, kind="stable"))

    def merged(self, other: Rows) -> Rows:
        """Both sets of rows in cache order. Both must keep a host copy."""
        kv = self._buffer().extended(len(self), other.keys, other.values)
        both = Rows(
            kv,
            np.concatenate([self.tape, other.tape]),
            np.concatenate([self.cache, other.cache]),
            np.concatenate([self.tokens, other.tokens]),
            np.concatenate([self.origin, other.origin]),
        )
        return both.sorted()

    def _buffer(self) -> KvBuffer:
        if self.kv is None:
            raise AssertionError("these rows have no host copy")
        return self.kv
