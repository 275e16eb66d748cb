"""What the toy's queries attended to: probes that leave nothing, and mass summed up while computing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtape.backends.protocol import AttentionMass
from kvtape.testing.toy_model import N_HEADS, N_LAYERS, Step, ToyMemory, compute

__all__ = ["MassAccount", "probe"]

F64 = npt.NDArray[np.float64]


def probe(
    memory: ToyMemory,
    tokens: Sequence[int],
    positions: Sequence[int],
    tape_of: Mapping[int, int],
    layers: tuple[int, ...],
) -> AttentionMass:
    """Compute `tokens` at these cache positions over the rows of `memory`; `tape_of` names those by cache position."""
    n_rows = len(memory.positions)
    heads = np.zeros((N_LAYERS, N_HEADS, n_rows))
    tape = np.array([tape_of[int(c)] for c in memory.positions], np.int64)
    for token, position in zip(tokens, positions, strict=True):
        step = compute(memory, token, position)
        old = step.seen < n_rows
        heads[:, :, step.seen[old]] += step.attention[:, :, old]
        memory = step.memory
    order = np.argsort(tape)
    return _account(tape[order], layers, len(tokens), heads[list(layers)][:, :, order])


@dataclass(frozen=True, slots=True)
class MassAccount:
    """Mass that computed queries paid, `[layer, head]` by tape position; each change gives a new account."""

    paid: Mapping[int, F64] = field(default_factory=dict)
    n_queries: int = 0

    def pay(self, step: Step, tape_of: Mapping[int, int]) -> MassAccount:
        """With the attention of one more query; `tape_of` names the rows it saw by cache position."""
        paid = dict(self.paid)
        for i, row in enumerate(step.seen):
            at = tape_of[int(step.memory.positions[row])]
            paid[at] = paid.get(at, 0.0) + step.attention[:, :, i]
        return MassAccount(paid, self.n_queries + 1)

    def cut(self, tape_stop: int) -> MassAccount:
        """Without the positions past a truncation: they will name new tokens."""
        return MassAccount({t: m for t, m in self.paid.items() if t < tape_stop}, self.n_queries)

    def of(self, resident: Sequence[int]) -> AttentionMass:
        """What was paid to the resident tape positions."""
        tape = np.array(sorted(resident), np.int64)
        nothing = np.zeros((N_LAYERS, N_HEADS))
        by_row = [self.paid.get(int(t), nothing) for t in tape]
        heads = np.stack(by_row, axis=-1) if by_row else np.zeros((N_LAYERS, N_HEADS, 0))
        return _account(tape, tuple(range(N_LAYERS)), self.n_queries, heads)


def _account(tape: npt.NDArray[np.int64], layers: tuple[int, ...], n_queries: int, heads: F64) -> AttentionMass:
    mass, peak = heads.sum(axis=1).astype(np.float32), heads.max(axis=1).astype(np.float32)
    return AttentionMass(tape, layers, n_queries, mass, peak)
