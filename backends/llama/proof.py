"""Each ability that passes the gates is executed once when a session opens; one that fails is reported false.

Six tokens a b c d c d: when the last two are moved over the removed middle, their layer-0 keys must become those that
c and d had there, since layer 0 sees only the token and its position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtape.backends.books import Books
from kvtape.backends.errors import EngineFault, FatalClass, StateRejected
from kvtape.backends.gates import Gates
from kvtape.backends.llama.blob import Cache
from kvtape.backends.llama.context import LIVE, SCRATCH
from kvtape.backends.llama.decoder import Decoder
from kvtape.backends.llama.gates import MemoryFacts
from kvtape.backends.llama.mass import AttentionRecord
from kvtape.backends.llama.memory import LiveMemory, MemoryFault

__all__ = ["prove"]

_N: Final = 6
_HOLE: Final = (2, 4)
# f16 rows that were rotated there and rounded again differ by less than 0.005; a wrong rotation by 0.3 to 0.7.
_TOLERANCE: Final = 0.02
_ROUNDINGS: Final = 2.0
"""Three roundings lie between a packed key that was moved and one that was computed there: as long as 1.7 of one."""


def prove(
    gates: Gates,
    facts: MemoryFacts,
    memory: LiveMemory,
    decoder: Decoder,
    n_vocab: int,
    record: AttentionRecord | None = None,
    *,
    rounding: float = 0.0,
) -> Gates:
    """`gates` with the flags down whose proof failed, the finding as reason. Leaves the memory and `record` empty.

    `record` is what attention_scores is proven with; `rounding`: of the coarser of the two storage types. Raises
    EngineFault when the engine cannot even compute six tokens.
    """
    a, b, c, d = (min(i, n_vocab - 1) for i in range(4))
    tolerance = max(_TOLERANCE, _ROUNDINGS * rounding)
    proof = _Proof(facts, memory, decoder, np.array([a, b, c, d, c, d], np.int32), tolerance)
    checks: dict[str, Callable[[], str | None]] = {
        "snapshot_state": proof.snapshot,
        "remove_tail": proof.remove_tail,
        "remove_middle": proof.remove_middle,
        "position_shift": proof.shift,
        "cold_store": proof.export_import,
        "recompute_range": proof.refill,
    }
    if record is not None:
        checks["attention_scores"] = lambda: proof.scores(record)
    for flag, check in checks.items():
        if getattr(gates.capabilities, flag):
            try:
                finding = check()
            except (EngineFault, MemoryFault, StateRejected) as err:
                finding = str(err)
            if finding is not None:
                gates = gates.without(flag, f"found when the session opened: {finding}")
    memory.clear()
    return gates


class _Proof:
    """Each method starts from six resident tokens and returns what went wrong, or None."""

    def __init__(
        self,
        facts: MemoryFacts,
        memory: LiveMemory,
        decoder: Decoder,
        tokens: npt.NDArray[np.int32],
        tolerance: float,
    ) -> None:
        self._facts = facts
        self._memory = memory
        self._decoder = decoder
        self._tokens = tokens
        self._tolerance = tolerance
        memory.clear()
        decoder.run(tokens, 0, LIVE, FatalClass.PREFILL_FAILED)
        self._saved = memory.save()

    def snapshot(self) -> str | None:
        first, second = (self._logits_after_load() for _ in range(2))
        return None if np.array_equal(first, second) else "a restored state computes other logits"

    def _logits_after_load(self) -> npt.NDArray[np.float32]:
        self._memory.load(self._saved)
        return self._decoder.run(self._tokens[:1], _N, LIVE, FatalClass.DECODE_FAILED).logits

    def remove_tail(self) -> str | None:
        before = self._reset()
        self._memory.remove(4, _N)
        return self._survivors(before, [0, 1, 2, 3])

    def remove_middle(self) -> str | None:
        before = self._reset()
        self._memory.remove(*_HOLE)
        return self._survivors(before, [0, 1, 4, 5])

    def shift(self) -> str | None:
        before = self._reset()
        if self._memory.has_cache_without_layers():
            return "one of its caches has no layers, and rotating nothing aborts the engine"
        self._memory.remove(*_HOLE)
        self._memory.shift(4, _N, -2)
        self._memory.flush()
        self._memory.confirm(np.arange(4, dtype=np.int64))
        after = _by_position(self._memory.read())
        if finding := _differences(_take(before, [0, 1]), _take(after, [0, 1]), 0.0):
            return f"rows that stay: {finding}"
        for layer, (old, new) in enumerate(zip(before.keys, after.keys, strict=True)):
            old_norms, new_norms = (np.linalg.norm(_floats(rows), axis=1) for rows in (old[4:], new[2:]))
            if np.max(np.abs(new_norms / old_norms - 1)) > self._tolerance:
                return f"keys of layer {layer} change their length"
        if any(not np.array_equal(o[4:], n[2:]) for o, n in zip(before.values, after.values, strict=True)):
            return "values change"
        if self._facts.kind == "plain":
            return self._moved(before.keys[0][4:], before.keys[0][2:4], after.keys[0][2:4])
        return None

    def _moved(self, there: npt.NDArray[Any], here: npt.NDArray[Any], found: npt.NDArray[Any]) -> str | None:
        """Keys that were moved from `there` must be those of `here`, also where rounding allows for much."""
        nearer_to_old = _distance(here, found) >= _distance(there, found)
        if nearer_to_old or _distance(here, found) > self._tolerance:
            return "layer-0 keys are not those of their new positions"
        return None

    def export_import(self) -> str | None:
        before = self._reset()
        block = self._memory.export(*_HOLE)
        self._memory.remove(*_HOLE)
        self._memory.stage(block, *_HOLE)
        self._memory.adopt_staged(*_HOLE)
        return self._survivors(before, list(range(_N)))

    def refill(self) -> str | None:
        before = self._reset()
        self._memory.remove(*_HOLE)
        self._memory.share(0, _HOLE[0])
        self._decoder.run(self._tokens[slice(*_HOLE)], _HOLE[0], SCRATCH, FatalClass.PREFILL_FAILED)
        self._memory.adopt_staged(*_HOLE)
        return self._survivors(before, list(range(_N)), self._tolerance)

    def scores(self, record: AttentionRecord) -> str | None:
        """Two tokens behind a hole: every layer pays all their attention to the rows that are there."""
        self._reset()
        self._memory.remove(*_HOLE)
        books = Books()
        for start in (0, _HOLE[1]):
            books = books.append(self._tokens[start : start + 2].tolist(), start, start)
        with record.counting():
            self._decoder.run(self._tokens[:2], _N, LIVE, FatalClass.PREFILL_FAILED)
        mass = record.take(books.append(self._tokens[:2].tolist(), _N, _N))
        if mass.tape_positions.tolist() != [0, 1, 4, 5, 6, 7] or mass.n_queries != 2:
            return f"{mass.n_queries} queries saw tape positions {mass.tape_positions.tolist()}"
        for layer, row in zip(mass.layers, mass.mass, strict=True):
            whole = float(row.sum()) / mass.n_queries
            if abs(whole / max(1, round(whole)) - 1) > _TOLERANCE:
                return f"attention of layer {layer} adds up to {whole} a query, not to its number of heads"
        return None

    def _reset(self) -> _Rows:
        self._memory.drop_scratch()
        self._memory.load(self._saved)
        return _by_position(self._memory.read())

    def _survivors(self, before: _Rows, positions: list[int], tolerance: float = 0.0) -> str | None:
        self._memory.confirm(np.array(positions, np.int64))
        return _differences(_take(before, positions), _by_position(self._memory.read()), tolerance)


class _Rows:
    """Keys and values per layer in position order."""

    def __init__(self, keys: list[npt.NDArray[Any]], values: list[npt.NDArray[Any]]) -> None:
        self.keys = keys
        self.values = values


def _by_position(cache: Cache) -> _Rows:
    ordered = cache.take(np.argsort(cache.positions, kind="stable"))
    return _Rows([k.numbers() for k in ordered.keys], [v.numbers() for v in ordered.values])


def _take(rows: _Rows, indices: list[int]) -> _Rows:
    return _Rows([k[indices] for k in rows.keys], [v[indices] for v in rows.values])


def _differences(expected: _Rows, found: _Rows, tolerance: float) -> str | None:
    """Which layer differs; at tolerance 0 to the bit."""
    for what, olds, news in (("keys", expected.keys, found.keys), ("values", expected.values, found.values)):
        for layer, (old, new) in enumerate(zip(olds, news, strict=True)):
            same = np.array_equal(old, new[: len(old)]) if tolerance == 0 else _distance(old, new) <= tolerance
            if not same:
                return f"{what} of layer {layer} differ"
    return None


def _distance(expected: npt.NDArray[Any], found: npt.NDArray[Any]) -> float:
    """The largest relative distance of a row."""
    old, new = _floats(expected), _floats(found)
    return float(np.max(np.linalg.norm(new - old, axis=1) / np.linalg.norm(old, axis=1)))


def _floats(rows: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return rows.astype(np.float64)
