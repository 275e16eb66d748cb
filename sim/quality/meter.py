"""What one simulated turn's queries found resident of what they attended to, beside the most that could have been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.sim.quality.attention import AttentionPath
from kvtape.sim.quality.bound import best_share
from kvtape.sim.quality.retained import Seen, piece_share, weigh

__all__ = ["TurnMass", "turn_mass"]


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
    have all of those queries, or there are none.
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
    if not queries or queries != sum(s.stop - s.start for s in seen):
        return None
    return TurnMass(queries, kept / queries, most / queries, best / queries)
