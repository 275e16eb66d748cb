"""What one simulated turn's queries found resident of what they attended to, beside the most that could have been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Final

from kvtape.sim.quality.attention import AttentionPath
from kvtape.sim.quality.bound import best_share
from kvtape.sim.quality.retained import Seen, piece_share, weigh

__all__ = ["FIGURES", "TurnMass", "over_turns", "turn_mass"]

FIGURES: Final = (
    "retained_mass",
    "retained_mass_high",
    "retained_mass_worst",
    "opt_retained_mass",
    "retained_mass_regret",
)

_DIGITS: Final = 9
"""Attention is recorded in float32; what lies behind that is rounding."""


@dataclass(frozen=True, slots=True)
class TurnMass:
    """Over the `queries` that a turn computed: the share of their attention mass on rows that were resident, 0 to 1.

    The share is at least `low` and at most `high`; `best` is the clairvoyant bound on `low`.
    """

    queries: int
    low: float
    high: float
    best: float


def turn_mass(path: AttentionPath, seen: Sequence[Seen], rows: int) -> TurnMass | None:
    """The account of the queries that `seen` tells of, ascending and disjoint.

    `rows`: what the policy may hold; where it held more, the bound is that of what it held. None where `path` does not
    have all of those queries.
    """
    queries, kept, most, best = 0, 0.0, 0.0, 0.0
    first = 0
    for piece in path.computed(seen[0].start, seen[-1].stop) if seen else ():
        while seen[first].stop <= piece.start:
            first += 1
        of_it = []
        for one in seen[first:]:
            if one.start >= piece.stop:
                break
            of_it.append(one.part(piece.start, piece.stop))
        weighed = weigh(piece)
        share = piece_share(weighed, of_it)
        held = max(s.n_rows for s in of_it)
        queries += share.queries
        kept += share.low * share.queries
        most += share.high * share.queries
        best += best_share(weighed, max(rows, held), share.queries) * share.queries
    if queries != sum(s.stop - s.start for s in seen):
        return None
    if not queries:
        return TurnMass(0, 1.0, 1.0, 1.0)
    return TurnMass(queries, kept / queries, most / queries, best / queries)


def over_turns(turns: Sequence[TurnMass | None]) -> dict[str, float | None]:
    """`FIGURES` over all turns, every query counted alike; all None where a turn has no account, or nothing was asked.

    `retained_mass` is the lower end of the interval, `retained_mass_high` the upper, `retained_mass_worst` the lower
    end of the turn that kept least. `opt_retained_mass` is the bound, `retained_mass_regret` what is missing to it.
    """
    known = [t for t in turns if t is not None and t.queries]
    if not known or None in turns:
        return dict.fromkeys(FIGURES)
    queries = sum(t.queries for t in known)
    low, high, best = (fsum(getattr(t, name) * t.queries for t in known) / queries for name in ("low", "high", "best"))
    worst = min(t.low for t in known)
    values = (low, high, worst, best, max(0.0, best - low))
    return dict(zip(FIGURES, (round(v, _DIGITS) for v in values), strict=True))
