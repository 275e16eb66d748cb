"""What a backend with a score source must do: probes that leave nothing, and mass on the right tape positions."""

from __future__ import annotations

import numpy as np

from kvtape.backends.errors import InputRejected
from kvtape.backends.protocol import AttentionMass
from kvtape.planner.layout import next_cache_position
from kvtape.planner.ranges import RangeSet
from kvtape.testing.bench import Bench

__all__ = ["mass_by_tape", "score_by_tape", "score_probe", "score_window", "take_mass"]

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
    # What a probe's queries pay is not counted: it says who would attend, not who did.
    bench.does("score of a probe", lambda: bench.backend.score(bench.draw(3, 2), 10), "attention_scores")
    bench.feed(bench.draw(2, 1))
    after = bench.does("take_mass", bench.backend.take_mass, "attention_scores")
    _check(bench, after, 2)
    heads = mass.mass.sum(axis=1) / 10
    if np.abs(heads - np.round(heads)).max() > _ROUNDING or (np.round(heads) < 1).any():
        bench.fail(f"take_mass: mass a query is {heads.tolist()} by layer, expected the number of heads")
    again = bench.does("take_mass", bench.backend.take_mass, "attention_scores")
    if again.n_queries or again.mass.any():
        bench.fail(f"take_mass twice: the second says {again.n_queries} queries and mass {again.mass.sum():.3g}")


def score_by_tape(bench: Bench) -> None:
    """After surgery a probe's mass is on the tape positions of the rows that received it, however they are stored."""
    probe = bench.draw(3, 2)
    _reorder(bench)
    twin = _laid_out_alike(bench)
    end = next_cache_position(bench.layout)
    found = bench.does("score of a probe", lambda: bench.backend.score(probe, len(bench.tape), [0]), "attention_scores")
    _check(bench, found, len(probe))
    _same_mass(bench, "score of a probe", found, twin.backend.score(probe, end, [0]))
    twin.close()


def mass_by_tape(bench: Bench) -> None:
    """After surgery what new queries pay is on the tape positions of the rows that received it."""
    _reorder(bench)
    twin, more = _laid_out_alike(bench), bench.draw(5, 2)
    bench.does("take_mass", bench.backend.take_mass, "attention_scores")
    twin.backend.take_mass()
    bench.feed(more)
    twin.feed(more)
    found = bench.does("take_mass", bench.backend.take_mass, "attention_scores")
    _check(bench, found, len(more))
    _same_mass(bench, "take_mass", found, twin.backend.take_mass())
    twin.close()


def _reorder(bench: Bench) -> None:
    """The rows of an early block stand behind all others, and there is a hole."""
    bench.feed(bench.draw(16))
    blob = bench.export(4, 8)
    bench.evict(4, 8)
    bench.admit(blob, 4, 4, next_cache_position(bench.layout))
    bench.evict(10, 12)


def _laid_out_alike(bench: Bench) -> Bench:
    """A session that was fed the same tokens in the order of the cache: there tape and cache positions are one.

    Layer 0 attends by token and cache position alone, so both pay the same to each of its rows.
    """
    places, twin = bench.places, bench.twin()
    twin.feed([bench.tape[places.get(c, 0)] for c in range(next_cache_position(bench.layout))])
    for hole in RangeSet([(0, len(twin.tape))]) - RangeSet((c, c + 1) for c in places):
        twin.evict(hole.start, hole.stop)
    return twin


def _same_mass(bench: Bench, what: str, found: AttentionMass, by_cache: AttentionMass) -> None:
    expected = dict(zip(by_cache.tape_positions.tolist(), by_cache.mass[0].tolist(), strict=True))
    n_old = len(expected)
    cache_of = {s.tape_start + i: s.cache_start + i for s in bench.layout for i in range(s.length)}
    for tape, mass in zip(found.tape_positions.tolist(), found.mass[0].tolist(), strict=True):
        right = expected.pop(cache_of[tape], None)
        if right is None or abs(mass - right) > _ROUNDING * max(right, 1 / n_old):
            bench.fail(
                f"{what}: layer 0 has mass {mass:.4g} on tape {tape}, which stands at cache {cache_of[tape]}; the "
                f"row there receives {right if right is None else format(right, '.4g')}"
            )


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
