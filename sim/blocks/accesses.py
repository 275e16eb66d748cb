"""The accesses of a trace under rules: what is looked up in which order, and when the same block came before."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvtape.sim.blocks.block_trace import BlockTrace, Ints, index_kind
from kvtape.sim.blocks.identity import by_first_use, path_codes, stable_order
from kvtape.sim.blocks.rules import Rules

__all__ = ["Accesses", "Workload"]


@dataclass(frozen=True, slots=True)
class Accesses:
    """All arrays are [accesses] in the order in which a request's blocks are admitted, but `starts` [requests + 1].

    `blocks`: dense codes. `request`, `depth`: which request and which of its blocks, from 0. `tokens`: of the block.
    `before`: index of the last access of the same block, -1 where there is none. `n_blocks`: distinct blocks.
    `warmup`: requests that are not measured.
    """

    blocks: Ints
    request: Ints
    depth: Ints
    tokens: Ints
    before: Ints
    starts: Ints
    n_blocks: int
    warmup: int

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def n_requests(self) -> int:
        return len(self.starts) - 1

    @property
    def filled(self) -> int:
        """Distinct blocks that the warm-up has seen: any larger budget is not full when measuring begins."""
        return int((self.before[: self.starts[self.warmup]] < 0).sum())


class Workload:
    """A trace under rules: what is of one block is found once, the accesses once for each order that is asked for."""

    def __init__(self, trace: BlockTrace, rules: Rules) -> None:
        self._starts, self._tokens = trace.starts, trace.tokens
        codes = by_first_use(trace.ids)
        self._blocks = path_codes(codes, trace.starts) if rules.identity == "path" else codes
        self._warmup = int(rules.warmup * trace.n_requests)
        self.n_blocks = int(self._blocks.max()) + 1
        """Distinct blocks."""

    @cached_property
    def root_first(self) -> Accesses:
        """Each request's first block is admitted first."""
        request, depth = self._places()
        return self._accesses(self._blocks, request, depth, self._tokens)

    @cached_property
    def root_last(self) -> Accesses:
        """Each request's first block is admitted last, and so is what a policy that goes by recency keeps longest."""
        request, place = self._places()
        depth = np.repeat(np.diff(self._starts).astype(place.dtype), np.diff(self._starts)) - 1 - place
        turn = self._starts[request] + depth
        return self._accesses(self._blocks[turn], request, depth, self._tokens[turn])

    def _accesses(self, blocks: Ints, request: Ints, depth: Ints, tokens: Ints) -> Accesses:
        before = _last_access(blocks)
        return Accesses(blocks, request, depth, tokens, before, self._starts, self.n_blocks, self._warmup)

    def _places(self) -> tuple[Ints, Ints]:
        """Of each access its request, and its place in it."""
        kind, counts = index_kind(len(self._blocks)), np.diff(self._starts)
        request = np.repeat(np.arange(len(counts), dtype=kind), counts)
        place = np.arange(len(self._blocks), dtype=kind) - np.repeat(self._starts[:-1].astype(kind), counts)
        return request, place


def _last_access(blocks: Ints) -> Ints:
    by_block = stable_order(blocks).astype(index_kind(len(blocks)))
    same = np.flatnonzero(blocks[by_block[1:]] == blocks[by_block[:-1]])
    before = np.full(len(blocks), -1, by_block.dtype)
    before[by_block[same + 1]] = by_block[same]
    return before
