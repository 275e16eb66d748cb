"""The arithmetic of the toy backend: a decoder of two layers with seeded weights, one token at a time, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["N_HEADS", "N_LAYERS", "N_VOCAB", "ROW_BYTES", "Step", "ToyMemory", "compute", "rotate"]

N_VOCAB = 64
N_LAYERS = 2
N_HEADS = 2
_HEAD_DIM = 8
_WIDTH = N_HEADS * _HEAD_DIM
ROW_BYTES = N_LAYERS * 2 * _WIDTH * 4
"""Bytes of one token's float32 keys and values over all layers."""

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_FREQUENCIES = 100.0 ** (-np.arange(_HEAD_DIM // 2) / (_HEAD_DIM // 2))


def _weights() -> tuple[F64, F64]:
    """Embedding `[vocab, width]`; query, key, value and output matrices `[layer, 4, width, width]`."""
    rng = np.random.default_rng(20240229)
    embedding = rng.standard_normal((N_VOCAB, _WIDTH))
    return embedding, rng.standard_normal((N_LAYERS, 4, _WIDTH, _WIDTH)) / np.sqrt(_WIDTH)


_EMBEDDING, _MATRICES = _weights()


@dataclass(frozen=True, slots=True)
class ToyMemory:
    """The KV cache: cache position of each row `[n]`, and per layer post-RoPE keys and values, float32 `[n, width]`.

    Rows stand in the order in which they came. Every operation gives a new memory and leaves the old one alone.
    """

    positions: I64
    keys: tuple[F32, ...]
    values: tuple[F32, ...]

    @classmethod
    def empty(cls) -> ToyMemory:
        nothing = np.zeros((0, _WIDTH), np.float32)
        return cls(np.zeros(0, np.int64), (nothing,) * N_LAYERS, (nothing,) * N_LAYERS)

    def take(self, which: npt.NDArray[Any]) -> ToyMemory:
        """Only the rows that `which` (a mask, or indices in order) picks."""
        return ToyMemory(
            self.positions[which], tuple(k[which] for k in self.keys), tuple(v[which] for v in self.values)
        )

    def at(self, start: int, stop: int) -> ToyMemory:
        """The rows at cache positions `[start, stop)`, in cache order."""
        inside = np.flatnonzero((self.positions >= start) & (self.positions < stop))
        return self.take(inside[np.argsort(self.positions[inside])])

    def without(self, start: int, stop: int) -> ToyMemory:
        """All but the rows at cache positions `[start, stop)`."""
        return self.take((self.positions < start) | (self.positions >= stop))

    def joined(self, other: ToyMemory) -> ToyMemory:
        return ToyMemory(
            np.concatenate([self.positions, other.positions]),
            tuple(np.concatenate(pair) for pair in zip(self.keys, other.keys, strict=True)),
            tuple(np.concatenate(pair) for pair in zip(self.values, other.values, strict=True)),
        )

    def moved(self, start: int, stop: int, delta: int) -> ToyMemory:
        """The rows at cache positions `[start, stop)` moved by `delta`, their keys turned with them."""
        inside = (self.positions >= start) & (self.positions < stop)
        angles = np.where(inside, delta, 0)
        keys = tuple(np.where(inside[:, None], rotate(k, angles), k).astype(np.float32) for k in self.keys)
        return replace(self, positions=self.positions + angles, keys=keys)

    def tobytes(self) -> bytes:
        rows: tuple[npt.NDArray[Any], ...] = (self.positions, *self.keys, *self.values)
        return b"".join(a.tobytes() for a in rows)

    @classmethod
    def frombytes(cls, data: bytes) -> ToyMemory:
        """Raises ValueError where the length is not that of whole rows."""
        n, rest = divmod(len(data), 8 + ROW_BYTES)
        if rest:
            raise ValueError(f"{len(data)} bytes are not whole rows of {8 + ROW_BYTES}")
        floats = np.frombuffer(data, np.float32, offset=8 * n).reshape(2, N_LAYERS, n, _WIDTH)
        positions = np.frombuffer(data, np.int64, count=n)
        return cls(positions.copy(), tuple(k.copy() for k in floats[0]), tuple(v.copy() for v in floats[1]))


@dataclass(frozen=True, slots=True)
class Step:
    """One computed token: the memory with its row, float32 logits `[vocab]`, and what its heads attended to.

    `attention` float64 `[layer, head, rows that it saw]`, its own row last; `seen` their indices in the memory.
    """

    memory: ToyMemory
    logits: F32
    attention: F64
    seen: I64


def compute(memory: ToyMemory, token: int, position: int) -> Step:
    """Compute `token` at cache `position`; it sees the rows before it and itself."""
    seen = np.flatnonzero(memory.positions < position)
    at = np.array([position])
    x = _EMBEDDING[token]
    keys, values, attention = [], [], []
    for layer, (wq, wk, wv, wo) in enumerate(_MATRICES):
        h = _rms(x)
        key = rotate((h @ wk)[None], at).astype(np.float32)
        value = (h @ wv)[None].astype(np.float32)
        mixed, mass = _attend(
            rotate((h @ wq)[None], at)[0],
            np.concatenate([memory.keys[layer][seen], key]),
            np.concatenate([memory.values[layer][seen], value]),
        )
        x = x + mixed @ wo
        keys.append(key)
        values.append(value)
        attention.append(mass)
    after = memory.joined(ToyMemory(at.astype(np.int64), tuple(keys), tuple(values)))
    logits = (_rms(x) @ _EMBEDDING.T).astype(np.float32)
    return Step(after, logits, np.stack(attention), np.append(seen, len(memory.positions)))


def rotate(rows: npt.NDArray[Any], positions: I64) -> F64:
    """Rotary embedding of `[n, width]` rows by these positions `[n]`; a head's halves turn together."""
    heads = rows.astype(np.float64).reshape(len(rows), N_HEADS, _HEAD_DIM)
    angle = positions[:, None, None] * _FREQUENCIES
    a, b = heads[..., : _HEAD_DIM // 2], heads[..., _HEAD_DIM // 2 :]
    cos, sin = np.cos(angle), np.sin(angle)
    turned = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return np.asarray(turned.reshape(len(rows), _WIDTH), np.float64)


def _attend(query: F64, keys: F32, values: F32) -> tuple[F64, F64]:
    """Mixed values `[width]` and the attention of each head `[head, n]`."""
    by_head: Sequence[npt.NDArray[Any]] = [a.reshape(len(a), N_HEADS, _HEAD_DIM) for a in (keys, values)]
    scores = np.einsum("hd,nhd->hn", query.reshape(N_HEADS, _HEAD_DIM), by_head[0]) / np.sqrt(_HEAD_DIM)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.einsum("hn,nhd->hd", weights, by_head[1]).reshape(_WIDTH), weights


def _rms(x: F64) -> F64:
    return np.asarray(x / np.sqrt(np.mean(x * x) + 1e-6))
