"""LRU at every budget in one pass: stack distances.

The distance of an access is how many other blocks came since the last access of its block: LRU holds the block at
every budget above it (Mattson, Gecsei, Slutz and Traiger 1970). The blocks since then are those whose last access in
the window is not followed by another in it, so a distance is a count of smaller values in a stretch of an array. A
wavelet matrix (Claude and Navarro 2012) answers all counts together: one pass over the array for each bit of an index.
"""

from __future__ import annotations

import numpy as np

from kvtape.sim.blocks.accesses import Accesses
from kvtape.sim.blocks.block_trace import Ints, index_kind

__all__ = ["NEVER", "count_below", "held_positions", "stack_distances"]

NEVER = np.iinfo(np.int64).max
"""Distance of a block that was not there before."""


def stack_distances(a: Accesses) -> Ints:
    """Distinct other blocks since the last access of the same block; NEVER for a first access. int64 [accesses]."""
    distances = np.full(len(a), NEVER, np.int64)
    again = np.flatnonzero(a.before >= 0).astype(a.before.dtype)
    last = a.before[again]
    # A block's first access inside the window has its last one before the window, at or before `last`.
    distances[again] = count_below(a.before + 1, last + 1, again, last + 2)
    return distances


def held_positions(a: Accesses) -> Ints:
    """Places in the LRU stack when the request is looked up, before any of its blocks moves; admitted root last.

    Every block of the request that was admitted earlier stood deeper, or is new: it has been counted once, and the
    request's own blocks do not displace each other.
    """
    distances = stack_distances(a)
    again = np.flatnonzero(a.before >= 0)
    distances[again] -= again - a.starts[a.request[again]]
    return distances


def count_below(values: Ints, start: Ints, stop: Ints, limit: Ints) -> Ints:
    """For each query, how many of `values[start:stop]` are below `limit`. Values are 0 or more. int64 [queries]."""
    kind = index_kind(len(values))
    level, low, high = values.astype(kind), start.astype(kind), stop.astype(kind)
    bound = np.minimum(limit, int(values.max(initial=0)) + 1).astype(kind)
    found = np.zeros(len(start), kind)
    zeros_before = np.zeros(len(values) + 1, kind)
    for bit in reversed(range(int(values.max(initial=0) + 1).bit_length())):
        zero = (level >> bit) & 1 == 0
        np.cumsum(zero, out=zeros_before[1:])
        n_zeros = zeros_before[-1]
        low_zeros, high_zeros = zeros_before[low], zeros_before[high]
        up = (bound >> bit) & 1 == 1
        found += np.where(up, high_zeros - low_zeros, 0).astype(kind)
        low = np.where(up, n_zeros + low - low_zeros, low_zeros).astype(kind)
        high = np.where(up, n_zeros + high - high_zeros, high_zeros).astype(kind)
        level = np.concatenate([level[zero], level[~zero]])
    return found.astype(np.int64)
