"""Real backends with one planted fault each, and books that swear that all is well.

Only the engine's memory tells the truth here: that is what the judge has to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtape.backends.llama.blob import LayerRows, SequenceState, build_sequence
from kvtape.backends.llama.session import LlamaBackend
from kvtape.backends.openvino.session import OpenVinoBackend
from kvtape.backends.protocol import Backend, Choose, Computed, DecodeRun, Engine, Logits, SessionConfig, Witness
from kvtape.backends.reference.model.rope import Rotary, plain_frequencies
from kvtape.backends.reference.session.backend import ReferenceBackend
from kvtape.backends.registry import open_engine
from kvtape.capacity.model import read_model
from kvtape.planner import layout as lay
from kvtape.planner.layout import Layout

__all__ = ["FAULTS", "LyingBackend", "opens_with", "tamper"]

Rows = list[npt.NDArray[Any]]


def tamper(backend: Backend, change: Callable[[Rows, Rows, npt.NDArray[np.int64]], None]) -> None:
    """Change rows inside the engine. `change` gets keys and values, a writable `[n, width]` a layer, and positions."""
    if isinstance(backend, LlamaBackend):
        cache = backend._memory.read()
        keys = [k.numbers().copy() for k in cache.keys]
        values = [v.numbers().copy() for v in cache.values]
        change(keys, values, cache.positions.astype(np.int64))
        changed = replace(
            cache,
            keys=tuple(LayerRows(k.ggml_type, n.view(np.uint8)) for k, n in zip(cache.keys, keys, strict=True)),
            values=tuple(LayerRows(v.ggml_type, n.view(np.uint8)) for v, n in zip(cache.values, values, strict=True)),
        )
        backend._memory.load(build_sequence(SequenceState(0, (changed,))))
        return
    if isinstance(backend, ReferenceBackend):
        seen = backend.witness()
        flat = [[rows.copy() for rows in part] for part in (seen.rows.keys, seen.rows.values)]
        change(*flat, seen.cache_positions)
        for store, keys, values in zip(backend._surgery.layers, *flat, strict=True):
            heads = store.rows(0, store.stop)[1].shape[1]
            store.remove(0, store.stop)
            store.put(seen.cache_positions, *(rows.reshape(len(rows), heads, -1) for rows in (keys, values)))
        return
    assert isinstance(backend, OpenVinoBackend)
    runner = backend._state._engine()
    states = runner.states()
    shapes = [rows.shape for rows in (*states.keys, *states.values)]
    keys, values = ([rows.reshape(len(rows), -1).copy() for rows in part] for part in (states.keys, states.values))
    change(keys, values, backend.witness().cache_positions)
    whole = [rows.reshape(shape) for rows, shape in zip((*keys, *values), shapes, strict=True)]
    runner.load(np.stack(whole[: len(keys)]), np.stack(whole[len(keys) :]))


class LyingBackend:
    """Everything goes to the real backend, but the books are those of a faultless one."""

    def __init__(self, inner: Backend) -> None:
        self._inner, self._ideal = inner, ()

    _ideal: Layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def books(self) -> Layout:
        return self._ideal

    def witness(self) -> Witness:
        return self._inner.witness()

    def prefill(self, tokens: Sequence[int], tape_start: int) -> Computed:
        self._grow(tape_start, len(tokens))
        return self._inner.prefill(tokens, tape_start)

    def decode_until(self, n: int, limit: int, tape_start: int, logits: Logits, choose: Choose) -> DecodeRun:
        self._grow(tape_start, n)
        return self._inner.decode_until(n, limit, tape_start, logits, choose)

    def evict(self, start: int, stop: int) -> None:
        self._ideal = lay.remove(self._ideal, start, stop)
        self.do_evict(start, stop)

    def shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        self._ideal = lay.shift(self._ideal, cache_start, cache_stop, delta)
        self.do_shift(cache_start, cache_stop, delta)

    def do_evict(self, start: int, stop: int) -> None:
        self._inner.evict(start, stop)

    def do_shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        self._inner.shift(cache_start, cache_stop, delta)

    def turn_again(self, layers: slice, cache_start: int, delta: int) -> None:
        """Rotate the keys from `cache_start` on by `delta`, in these layers, without moving them."""
        shape = read_model(self._inner.facts.path)
        rotary = Rotary(plain_frequencies(shape.rope_base, shape.rope_dims), shape.rope_pairs)

        def change(keys: Rows, values: Rows, positions: npt.NDArray[np.int64]) -> None:
            which = np.flatnonzero(positions >= cache_start)
            for rows in keys[layers]:
                heads = rows[which].reshape(len(which), shape.n_head_kv, -1)
                turned = rotary.turn(heads, np.full(len(which), delta))
                rows[which] = turned.reshape(len(which), -1)

        tamper(self._inner, change)

    def _grow(self, tape_start: int, n: int) -> None:
        self._ideal = lay.append(self._ideal, tape_start, n, lay.next_cache_position(self._ideal))


class Faultless(LyingBackend):
    pass


class ForgetsToEvict(LyingBackend):
    def do_evict(self, start: int, stop: int) -> None:
        pass


class EvictsOneTooMany(LyingBackend):
    def do_evict(self, start: int, stop: int) -> None:
        self._inner.evict(start, stop + 1)


class EvictsTheNeighbour(LyingBackend):
    """The right number of rows, one position off."""

    def do_evict(self, start: int, stop: int) -> None:
        self._inner.evict(start + 1, stop + 1)


class SkipsTheShift(LyingBackend):
    def do_shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        pass


class ShiftsOneTooFew(LyingBackend):
    """The rows stand one position too high."""

    def do_shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        self._inner.shift(cache_start, cache_stop, delta + 1)


class MovesWithoutTurning(LyingBackend):
    """The positions that it reports are right, the keys still stand at the old ones."""

    def do_shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        pass

    def witness(self) -> Witness:
        seen = self._inner.witness()
        claimed = np.concatenate([np.arange(s.cache_start, s.cache_stop) for s in self._ideal])
        order = np.argsort(seen.cache_positions)
        positions = np.empty_like(seen.cache_positions)
        positions[order] = claimed
        return replace(seen, cache_positions=positions)


class TurnsTwice(LyingBackend):
    """Moved once, rotated twice."""

    def do_shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        self._inner.shift(cache_start, cache_stop, delta)
        self.turn_again(slice(None), cache_start + delta, delta)


class TurnsTwiceInLayer1(LyingBackend):
    def do_shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        self._inner.shift(cache_start, cache_stop, delta)
        self.turn_again(slice(1, 2), cache_start + delta, delta)


class WrongKeysInLayer1(LyingBackend):
    """Layer 0 keeps the survivors, layer 1 keeps the keys of their neighbours."""

    def do_evict(self, start: int, stop: int) -> None:
        self._inner.evict(start, stop)

        def change(keys: Rows, values: Rows, positions: npt.NDArray[np.int64]) -> None:
            keys[1][:] = np.roll(keys[1], 1, axis=0)

        tamper(self._inner, change)


class WrongValues(LyingBackend):
    """Right keys everywhere, the values of layer 0 belong to the neighbours."""

    def do_evict(self, start: int, stop: int) -> None:
        self._inner.evict(start, stop)

        def change(keys: Rows, values: Rows, positions: npt.NDArray[np.int64]) -> None:
            values[0][:] = np.roll(values[0], 1, axis=0)

        tamper(self._inner, change)


class OneBitInOneRow(LyingBackend):
    """The smallest damage: the last bit of one value of one row of the last layer."""

    def do_evict(self, start: int, stop: int) -> None:
        self._inner.evict(start, stop)

        def change(keys: Rows, values: Rows, positions: npt.NDArray[np.int64]) -> None:
            values[-1][2].view(np.uint8)[0] ^= 1

        tamper(self._inner, change)


FAULTS: dict[str, type[LyingBackend]] = {
    f.__name__: f
    for f in (
        ForgetsToEvict,
        EvictsOneTooMany,
        EvictsTheNeighbour,
        SkipsTheShift,
        ShiftsOneTooFew,
        MovesWithoutTurning,
        TurnsTwice,
        TurnsTwiceInLayer1,
        WrongKeysInLayer1,
        WrongValues,
        OneBitInOneRow,
    )
}


class _FaultyEngine:
    def __init__(self, inner: Engine, kind: type[LyingBackend]) -> None:
        self._inner, self._kind = inner, kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, config: SessionConfig) -> Backend:
        return self._kind(self._inner.open(config))


def opens_with(kind: type[LyingBackend]) -> Callable[[str, Path, Mapping[str, str]], Engine]:
    """An `open_engine` whose backends have this fault."""

    def opened(name: str, path: Path, options: Mapping[str, str]) -> Engine:
        return _FaultyEngine(open_engine(name, path, options), kind)

    return opened
