"""Toy backends with one fault each: what the conformance suite must find, and say rightly.

The books of most of them swear that all is well; only the memory, or what happens next, tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvtape.backends.envelope import unwrap
from kvtape.backends.errors import EngineFault, StateRejected, UnsupportedOperation
from kvtape.backends.protocol import AttentionMass, Computed, SessionConfig
from kvtape.testing.bench import Factory
from kvtape.testing.toy import ToyBackend, ToyRow, open_toy
from kvtape.testing.toy_model import ToyMemory

__all__ = ["WRONG_TOYS", "factory_of"]


class ForgetsToEvict(ToyBackend):
    """The books let the rows go, the memory keeps them."""

    def evict(self, start: int, stop: int) -> None:
        memory = self._memory
        super().evict(start, stop)
        self._memory = memory


class EvictsOneTooMany(ToyBackend):
    """The row behind the range goes, too."""

    def evict(self, start: int, stop: int) -> None:
        at = self._run(start, stop) + stop - start
        super().evict(start, stop)
        self._memory = self._memory.without(at, at + 1)


class EvictsInOneLayerOnly(ToyBackend):
    """Layer 0 lets the rows go, the values of layer 1 stay."""

    def evict(self, start: int, stop: int) -> None:
        kept = self._memory.values[1]
        super().evict(start, stop)
        self._memory = replace(self._memory, values=(self._memory.values[0], kept))


class KeepsWrongPositions(ToyBackend):
    """A shift moves the books; the rows stay where they stood."""

    def shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        memory = self._memory
        super().shift(cache_start, cache_stop, delta)
        self._memory = memory


class MovesWithoutTurning(ToyBackend):
    """A shift moves the positions; the keys are still those of the old ones."""

    def shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        keys = self._memory.keys
        super().shift(cache_start, cache_stop, delta)
        self._memory = replace(self._memory, keys=keys)


class ClaimsAColdStore(ToyBackend):
    """The flag is true, the operation is not there."""

    def export_block(self, start: int, stop: int) -> bytes:
        raise UnsupportedOperation("export_block", "not written yet")


class HidesAnAbility(ToyBackend):
    """A false flag whose operation works all the same."""

    def __init__(self, config: SessionConfig) -> None:
        super().__init__(config)
        self._can = self.capabilities
        self.capabilities = replace(self.capabilities, position_shift=False)

    def shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        told, self.capabilities = self.capabilities, self._can
        super().shift(cache_start, cache_stop, delta)
        self.capabilities = told


class MutatesOnRefusal(ToyBackend):
    """Takes the good tokens before it refuses the bad one."""

    def prefill(self, tokens: Sequence[int], tape_start: int) -> Computed:
        good = [t for t in tokens if 0 <= t < self.facts.n_vocab]
        if len(good) < len(tokens):
            super().prefill(good, tape_start)
        return super().prefill(tokens, tape_start)


class AdmitsAtTheWrongPlace(ToyBackend):
    """Rows come back behind the last row, whatever was asked; the books say what was asked."""

    def admit(self, block: bytes, start: int, cache_start: int) -> None:
        end, before = self._next(), self._memory
        super().admit(block, start, cache_start)
        n = len(self._memory.positions) - len(before.positions)
        self._memory = self._memory.moved(cache_start, cache_start + n, end - cache_start)


class BringsBackOtherRows(ToyBackend):
    """A block comes back with the rows of its neighbours."""

    def admit(self, block: bytes, start: int, cache_start: int) -> None:
        super().admit(block, start, cache_start)
        here = (self._memory.positions >= cache_start) & (self._memory.positions < cache_start + 4)
        keys = [k.copy() for k in self._memory.keys]
        for rows in keys:
            rows[here] = np.roll(rows[here], 1, axis=0)
        self._memory = replace(self._memory, keys=tuple(keys))


class TakesDamagedBlocks(ToyBackend):
    """Reads the payload without looking at the checksum."""

    def _unwrap(self, kind: str, blob: bytes) -> tuple[tuple[ToyRow, ...], ToyMemory]:
        try:
            return super()._unwrap(kind, blob)
        except StateRejected:
            if len(blob) != self._last:
                raise
            header, payload = unwrap(self._good, {})
            return tuple(ToyRow(*row) for row in header["rows"]), ToyMemory.frombytes(payload)

    _last, _good = 0, b""

    def _wrap(self, kind: str, rows: Sequence[ToyRow], memory: ToyMemory) -> bytes:
        self._good = super()._wrap(kind, rows, memory)
        self._last = len(self._good)
        return self._good


class RestoresTheBooksOnly(ToyBackend):
    """A restore forgets the memory."""

    def restore(self, snapshot: bytes) -> None:
        memory = self._memory
        super().restore(snapshot)
        self._memory = memory


class GoesOnAfterAFault(ToyBackend):
    """An engine that failed is asked again."""

    def prefill(self, tokens: Sequence[int], tape_start: int) -> Computed:
        try:
            return super().prefill(tokens, tape_start)
        except EngineFault:
            self._fault, self._abort = None, False
            raise


class LeavesItsProbeBehind(ToyBackend):
    """The probe's cells stay in the memory."""

    def score(self, tokens: Sequence[int], tape_start: int, layers: Sequence[int] | None = None) -> AttentionMass:
        mass = super().score(tokens, tape_start, layers)
        books = self._books
        self._compute(tokens[:1], [tape_start], self._next())
        self._books = books
        return mass


class ScoresByCell(ToyBackend):
    """Rows of a score come in the order of the cache; the positions beside them swear otherwise."""

    def score(self, tokens: Sequence[int], tape_start: int, layers: Sequence[int] | None = None) -> AttentionMass:
        return self._as_stored(super().score(tokens, tape_start, layers))

    def _as_stored(self, found: AttentionMass) -> AttentionMass:
        stored = [r.tape for r in self.rows if r.tape in set(found.tape_positions.tolist())]
        order = np.searchsorted(found.tape_positions, stored)
        return replace(found, mass=found.mass[:, order], peak=found.peak[:, order])


class CountsByCell(ScoresByCell):
    """The same of the mass that is counted while computing."""

    score = ToyBackend.score

    def take_mass(self) -> AttentionMass:
        return self._as_stored(super().take_mass())


class CountsItsProbes(ToyBackend):
    """What a probe's queries pay is added to what was counted."""

    _probes = 0

    def score(self, tokens: Sequence[int], tape_start: int, layers: Sequence[int] | None = None) -> AttentionMass:
        self._probes += len(tokens)
        return super().score(tokens, tape_start, layers)

    def take_mass(self) -> AttentionMass:
        counted, self._probes = self._probes, 0
        found = super().take_mass()
        return replace(found, n_queries=found.n_queries + counted)


class ScoresWhatIsGone(ToyBackend):
    """Evicted rows are still among the scored ones."""

    def score(self, tokens: Sequence[int], tape_start: int, layers: Sequence[int] | None = None) -> AttentionMass:
        found = super().score(tokens, tape_start, layers)
        whole = np.arange(tape_start)
        mass, peak = (np.zeros((len(found.layers), tape_start), np.float32) for _ in range(2))
        mass[:, found.tape_positions], peak[:, found.tape_positions] = found.mass, found.peak
        return replace(found, tape_positions=whole, mass=mass, peak=peak)


def factory_of(kind: type[ToyBackend]) -> Factory:
    """Opens this toy as `open_toy` opens the right one."""

    def opened(config: SessionConfig) -> ToyBackend:
        right = open_toy(config)
        if kind is HidesAnAbility:
            return HidesAnAbility(config)
        return kind(config, right.capabilities)

    return opened


# For the command line: `pytest --kvtape-backend support.wrong_toys:forgets_to_evict`.
forgets_to_evict: Callable[[SessionConfig], ToyBackend] = factory_of(ForgetsToEvict)  # type: ignore[assignment]

WRONG_TOYS: dict[type[ToyBackend], tuple[str, str]] = {
    ForgetsToEvict: (
        "evict",
        r"after evict of \[4, 8\): the memory has rows at \[0, 20\), expected \[0, 4\) \[8, 20\)",
    ),
    EvictsOneTooMany: ("evict", r"the memory has rows at \[0, 4\) \[9, 20\), expected \[0, 4\) \[8, 20\)"),
    EvictsInOneLayerOnly: ("evict", r"after evict of \[4, 8\): layer 1 has 20 rows of values, expected 16"),
    KeepsWrongPositions: (
        "shift",
        r"after shift of cache \[8, 14\) by -4: the memory has rows at \[0, 4\) \[8, 14\), expected \[0, 10\)",
    ),
    MovesWithoutTurning: ("shift", r"by -4: the row at cache \d+ does not hold token \d+ of tape \d+"),
    ClaimsAColdStore: ("admit_in_place", r"export_block of .*UnsupportedOperation, although cold_store is true"),
    HidesAnAbility: ("without_position_shift", "shift with position_shift false: was accepted, must raise Unsupported"),
    MutatesOnRefusal: ("bad_tokens", "prefill of token -1: was refused, but the books changed"),
    AdmitsAtTheWrongPlace: (
        "admit_in_place",
        r"at cache 4: the memory has rows at \[0, 4\) \[8, 20\), expected \[0, 16\)",
    ),
    BringsBackOtherRows: ("admit_in_place", r"at cache 4: the row at cache \d does not hold token"),
    TakesDamagedBlocks: ("bad_blocks", "admit of one flipped bit: was accepted, must raise StateRejected"),
    RestoresTheBooksOnly: ("snapshot_and_restore", r"after restore: the memory has rows at \[0, 2\)"),
    GoesOnAfterAFault: ("fault", "prefill after a fault: was accepted, must raise KvtapeError"),
    LeavesItsProbeBehind: ("score_probe", r"after score of a probe: the memory has rows at \[0, 4\) \[8, 15\)"),
    ScoresWhatIsGone: ("score_probe", r"mass is about tape \[0, 1, 2, 3, 4, 5, .* resident is \[0, 1, 2, 3, 8, "),
    CountsItsProbes: ("take_mass", r"mass \(2, 12\) of 5 queries, expected \(2, 12\) of 2"),
    ScoresByCell: ("score_by_tape", r"layer 0 has mass .* on tape 4, which stands at cache 16; the row there receives"),
    CountsByCell: ("mass_by_tape", r"take_mass: layer 0 has mass .* on tape 4, which stands at cache 16"),
}
"""The first scenario that must fail, and a pattern of what it must say."""
