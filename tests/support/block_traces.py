"""Small traces of prefix blocks for tests, and rules as plain loops: slow, and nothing but the definition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from kvtape.sim.blocks.block_trace import BlockTrace, made_trace
from kvtape.sim.blocks.rules import Rules

__all__ = ["block_trace", "naive_opt", "paths", "plain_rate", "request_lists", "single_rules"]

Path = tuple[tuple[int, ...], ...]
"""A request: each block is the ids from the first to its own."""

request_lists = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=14)
"""Requests as lists of ids that are anything but chained: an id means another block behind other ids."""

single_rules = Rules(
    weighting="block", prefix="any", warmup=0.0, in_flight="none", bypass=False, identity="id", order="root_first"
)


def block_trace(requests: Sequence[Sequence[int]], tail: int = 4, block_tokens: int = 4) -> BlockTrace:
    """Every request ends with a block of `tail` tokens."""
    counts = np.array([len(r) for r in requests], np.int64)
    ids = np.array([i for r in requests for i in r], np.uint64)
    return made_trace(ids, counts, (counts - 1) * block_tokens + tail, block_tokens, name="test", digest="0" * 64)


def paths(requests: Sequence[Sequence[int]]) -> list[Path]:
    return [tuple(tuple(r[: i + 1]) for i in range(len(r))) for r in requests]


def plain_rate(hits: Sequence[Sequence[bool]], weights: Sequence[Sequence[int]], rules: Rules) -> tuple[int, int]:
    """(weight of the hits, weight of everything) over the measured requests; hits and weights from the first block."""
    found = total = 0
    for row, weight in list(zip(hits, weights, strict=True))[int(rules.warmup * len(hits)) :]:
        total += sum(weight)
        alive = True
        for hit, w in zip(row, weight, strict=True):
            alive = alive and hit
            found += w * (alive if rules.prefix == "longest" else hit)
    return found, total


def naive_opt(steps: Sequence[frozenset[object]], budget: int, *, bypass: bool) -> int:
    """The most hits that any cache can have, by trying all of them: after each step it keeps any part of what it
    held and what was looked up. Without bypass it must hold what was looked up at that moment.
    """
    best: dict[frozenset[object], int] = {frozenset(): 0}
    for step in steps:
        reached: dict[frozenset[object], int] = {}
        for held, hits in best.items():
            now = hits + len(held & step)
            for kept in _parts(held | step, budget):
                if (bypass or step <= kept) and reached.get(kept, -1) < now:
                    reached[kept] = now
        best = reached
    return max(best.values())


def _parts(blocks: frozenset[object], budget: int) -> list[frozenset[object]]:
    found = [frozenset[object]()]
    for block in blocks:
        found += [part | {block} for part in found if len(part) < budget]
    return found
