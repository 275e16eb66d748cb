"""The clairvoyant bound: the most of its attention mass that a piece of queries could have found resident.

Belady's idea for a cache of rows that are all looked at, with weights: at each piece anew the chunks that it will
attend to most are there, as many as fit, whatever was there before. Nothing that has to decide without knowing, or that
cannot bring back what it dropped, keeps more whole chunks' mass at any piece.
"""

from __future__ import annotations

import numpy as np

from kvtape.sim.quality.retained import Floats, Ints, Weighed

__all__ = ["best_share"]


def best_share(piece: Weighed, rows: int, queries: int | None = None) -> float:
    """The largest share that `rows` resident rows can hold, 0 to 1; of `queries` of the piece's, None for all.

    A chunk may be there in part, with that part of its mass, so this is the fractional knapsack's value: at least what
    any choice of whole chunks gives (Dantzig 1957). Keys of the piece itself and of a chunk that it goes on with cost
    nothing, but that the last query is a row too. Of fewer queries than all nothing is known but their whole mass, so
    they may have paid all that there is to what is kept.
    """
    n, of = piece.stop - piece.start if queries is None else queries, piece.stop - piece.start
    total = piece.total
    if total <= 0.0:
        return 1.0
    earlier = piece.stops <= piece.start
    own = float(piece.mass[~earlier].sum())
    sizes = piece.stops[earlier] - piece.starts[earlier]
    kept = own + _fill(piece.mass[earlier], sizes, max(0, rows - 1))
    return min(1.0, kept / (total * n / of))


def _fill(mass: Floats, sizes: Ints, rows: int) -> float:
    """The most mass that fits `rows`, the densest chunks first, the last one in part."""
    if int(sizes.sum()) <= rows:
        return float(mass.sum())
    order = np.argsort(-(mass / np.maximum(sizes, 1)), kind="stable")
    ends = np.cumsum(sizes[order])
    whole = int(np.searchsorted(ends, rows, side="right"))
    left = rows - (int(ends[whole - 1]) if whole else 0)
    kept = float(mass[order[:whole]].sum())
    torn = order[whole]
    return kept + float(mass[torn]) * left / int(sizes[torn])
