"""Which accesses are of one block: ids made dense, and told apart by the blocks before them where that matters."""

from __future__ import annotations

import numpy as np

from kvtape.sim.blocks.block_trace import Ids, Ints, index_kind

__all__ = ["by_first_use", "path_codes", "stable_order"]

_DENSE = 4
"""Ids are looked up in a table where the largest is at most so many times their number."""


def by_first_use(keys: Ids | Ints) -> Ints:
    """Codes 0, 1, 2, ... in the order in which the keys first come."""
    if len(keys) and int(keys.max()) < _DENSE * len(keys):
        return _from_table(keys)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rank = np.empty(len(first), index_kind(len(keys)))
    rank[np.argsort(first)] = np.arange(len(first))
    codes: Ints = rank[inverse]
    return codes


def _from_table(keys: Ids | Ints) -> Ints:
    kind = index_kind(len(keys))
    at = np.arange(len(keys), dtype=kind)
    first = np.empty(int(keys.max()) + 1, kind)
    first[keys[::-1]] = at[::-1]  # of several values for one place the last stays
    earliest = first[keys]
    codes: Ints = (np.cumsum(earliest == at, dtype=kind) - 1)[earliest]
    return codes


def stable_order(keys: Ints) -> Ints:
    """Indices that sort keys of 0 or more, 16 bits at a time: those NumPy sorts without comparing, in linear time."""
    order = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable")
    for shift in range(16, int(keys.max(initial=0)).bit_length(), 16):
        part = ((keys >> shift) & 0xFFFF).astype(np.uint16)[order]
        order = order[np.argsort(part, kind="stable")]
    return order


def path_codes(codes: Ints, starts: Ints) -> Ints:
    """Codes that are equal where the block and all blocks before it in its request are.

    Chained ids are so by themselves, which is seen without building anything: each id has one predecessor.
    """
    before = np.empty_like(codes)
    before[1:] = codes[:-1]
    heads = starts[:-1]
    before[heads[heads < len(codes)]] = -1
    one = np.empty(int(codes.max(initial=-1)) + 1, codes.dtype)
    one[codes] = before
    return codes if bool((one[codes] == before).all()) else _by_depth(codes, starts)


def _by_depth(codes: Ints, starts: Ints) -> Ints:
    """One level of the tree of prefixes after the other: a node is its parent and its id."""
    nodes = np.empty(len(codes), np.int64)
    lengths = np.diff(starts)
    width = int(codes.max()) + 1
    live = np.argsort(-lengths, kind="stable")
    parent = np.zeros(len(lengths), np.int64)
    n_nodes = 0
    for depth in range(int(lengths.max())):
        live = live[: np.searchsorted(-lengths[live], -depth)]
        at = starts[live] + depth
        keys, inverse = np.unique(parent[live] * width + codes[at], return_inverse=True)
        nodes[at] = parent[live] = n_nodes + inverse
        n_nodes += len(keys)
    return by_first_use(nodes)
