"""What a backend with a score source must do: probes that leave nothing, and mass on the right tape positions."""

from __future__ import annotations

import numpy as np

from kvtape.backends.errors import InputRejected
from kvtape.backends.protocol import AttentionMass
from kvtape.testing.bench import Bench

__all__ = ["score_probe", "score_window", "take_mass"]

_ROUNDING = 0.01


def score_probe(bench: Bench) -> None:
    """A probe at the tape's end scores every resident row, and nothing of it remains."""
    tokens, more = bench.draw(14), bench.draw(4, 1)
    bench.feed(tokens)
    if bench.backend.capabilities.remove_middle:
        bench.evict(4, 8)
    rows, probe = bench.image(), bench.draw(3, 2)
    mass = bench.does("score of a probe", lambda: bench.backend.score(probe, 14), "attention_scores")
    bench.check("score of a probe")
    if bench.image() != rows:
        bench.fail("score of a probe: rows of the memory changed")
    _check(bench, mass, len(probe))
    one = bench.does("score of one layer", lambda: bench.backend.score(probe, 14, [0]), "attention_scores")
    if one.layers != (0,) or not np.allclose(one.mass[0], mass.mass[0], rtol=_ROUNDING, atol=1e-4):
        bench.fail(f"score of layer 0 alone gave layers {one.layers} or other mass than with all layers")
    bench.refuses("score of a bad token", lambda: bench.backend.score([-1], 14), InputRejected)
    bench.feed(more)
    twin = bench.twin()
    twin.feed(tokens)
    if bench.backend.capabilities.remove_middle:
        twin.evict(4, 8)
    twin.feed(more)
    bench.same_logits("with and without a probe before it", bench.logits, twin.logits)
    twin.close()


def score_window(bench: Bench) -> None:
    """The last tokens of the tape, computed again, score the rows before them only; the books stay."""
    bench.feed(bench.draw(14))
    rows, window = bench.image(), bench.tape[10:]
    mass = bench.does("score of the last window", lambda: bench.backend.score(window, 10), "attention_scores")
    bench.check("score of the last window")
    if bench.image() != rows:
        bench.fail("score of the last window: rows of the memory changed")
    if mass.tape_positions.tolist() != list(range(10)):
        bench.fail(f"score of the window [10, 14) is about tape {mass.tape_positions.tolist()}, expected [0, 10)")


def take_mass(bench: Bench) -> None:
    """Mass of what was computed since the last look: each query pays a whole number of heads while all rows stay."""
    bench.does("take_mass", bench.backend.take_mass, "attention_scores")
    bench.feed(bench.draw(10))
    mass = bench.does("take_mass", bench.backend.take_mass, "attention_scores")
    _check(bench, mass, 10)
    heads = mass.mass.sum(axis=1) / 10
    if np.abs(heads - np.round(heads)).max() > _ROUNDING or (np.round(heads) < 1).any():
        bench.fail(f"take_mass: mass a query is {heads.tolist()} by layer, expected the number of heads")
    again = bench.does("take_mass", bench.backend.take_mass, "attention_scores")
    if again.n_queries or again.mass.any():
        bench.fail(f"take_mass twice: the second says {again.n_queries} queries and mass {again.mass.sum():.3g}")


def _check(bench: Bench, mass: AttentionMass, n_queries: int) -> None:
    resident = sorted(p for s in bench.layout for p in range(s.tape_start, s.tape_stop))
    if mass.tape_positions.tolist() != resident:
        bench.fail(f"mass is about tape {mass.tape_positions.tolist()}, resident is {resident}")
    shape = (len(mass.layers), len(resident))
    if mass.mass.shape != shape or mass.peak.shape != shape or mass.n_queries != n_queries:
        bench.fail(f"mass {mass.mass.shape} of {mass.n_queries} queries, expected {shape} of {n_queries}")
    good = np.isfinite(mass.mass).all() and (mass.peak >= 0).all() and (mass.mass >= mass.peak - 1e-5).all()
    if not good or not (mass.mass.sum(axis=1) > 0).all():
        bench.fail("mass must be finite and positive, and at least the peak of one head")
