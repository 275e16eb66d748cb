"""The accesses of a trace under rules: what is looked up in which order, and when the same block came before."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvtape.sim.blocks.block_trace import BlockTrace, Ints
from kvtape.sim.blocks.identity import by_first_use, path_codes
from kvtape.sim.blocks.rules import Rules

__all__ = ["Accesses", "Workload"]


@dataclass(frozen=True, slots=True)
class Accesses:
    """All arrays are [accesses] in the order in which a request's blocks are admitted, but `starts` [requests + 1].

    `blocks`: dense codes. `request`, `depth`: which request and which of its blocks, from 0. `tokens`: of the block.
    `before`, `after`: index of the last and the next access of the same block; -1 and the number of accesses where
    there is none. `n_blocks`: distinct blocks. `warmup`: requests that are not measured.
    """

    blocks: Ints
    request: Ints
    depth: Ints
    tokens: Ints
    before: Ints
    after: Ints
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
        counts = np.diff(self._starts)
        request = np.repeat(np.arange(len(counts)), counts)
        depth = np.arange(len(self._blocks)) - self._starts[request]
        return self._accesses(self._blocks, request, depth, self._tokens)

    @cached_property
    def root_last(self) -> Accesses:
        """Each request's first block is admitted last, and so is what a policy that goes by recency keeps longest."""
        counts = np.diff(self._starts)
        request = np.repeat(np.arange(len(counts)), counts)
        depth = self._starts[request + 1] - 1 - np.arange(len(self._blocks))
        turn = self._starts[request] + depth
        return self._accesses(self._blocks[turn], request, depth, self._tokens[turn])

    def _accesses(self, blocks: Ints, request: Ints, depth: Ints, tokens: Ints) -> Accesses:
        before, after = _neighbours(blocks)
        return Accesses(blocks, request, depth, tokens, before, after, self._starts, self.n_blocks, self._warmup)


def _neighbours(blocks: Ints) -> tuple[Ints, Ints]:
    n = len(blocks)
    by_block = np.argsort(blocks, kind="stable")
    same = blocks[by_block[1:]] == blocks[by_block[:-1]]
    before, after = np.full(n, -1, np.int64), np.full(n, n, np.int64)
    before[by_block[1:][same]] = by_block[:-1][same]
    after[by_block[:-1][same]] = by_block[1:][same]
    return before, after
