"""Requests collected one by one into flat arrays, then put in the order of their arrival."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvtape.sim.blocks.block_trace import BlockTrace, Ids, Ints, Requests, made_trace
from kvtape.sim.blocks.errors import CurveError

__all__ = ["Gathering"]


class Gathering:
    """`name`: of the source, for errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ids = array("Q")
        self._counts, self._prompts, self._at, self._outputs = array("q"), array("q"), array("q"), array("q")
        self._block_tokens: int | None = None

    def __len__(self) -> int:
        return len(self._at)

    def add(
        self, at_ns: int, prompt_tokens: int, ids: Sequence[int], block_tokens: int | None, output_tokens: int = 0
    ) -> None:
        """One request; without ids it counts as one of which nothing is known. Raises CurveError: mixed sizes."""
        if len(ids):
            if self._block_tokens is None:
                self._block_tokens = block_tokens
            elif block_tokens != self._block_tokens:
                raise CurveError(
                    f"{self._name}: blocks of {self._block_tokens} and of {block_tokens} tokens; "
                    f"budgets are in blocks of one size: take the sources apart"
                )
        self._ids.extend(ids)
        self._counts.append(len(ids))
        self._prompts.append(prompt_tokens)
        self._at.append(at_ns)
        self._outputs.append(output_tokens)

    def trace(self, digest: str, *, ordered: bool) -> BlockTrace:
        """By arrival unless `ordered`; requests of one stamp stay in the order they were added in. Raises NoBlocks."""
        return self._timed(digest, ordered=ordered).trace

    def requests(self, digest: str) -> Requests:
        """By arrival, with times, and without the requests of which no blocks are known. Raises NoBlocks."""
        return self._timed(digest, ordered=False)

    def _timed(self, digest: str, *, ordered: bool) -> Requests:
        ids: Ids = np.frombuffer(self._ids, np.uint64) if len(self._ids) else np.zeros(0, np.uint64)
        if int(ids.max(initial=0)) < 2**32:
            ids = ids.astype(np.uint32)
        counts, prompts = np.array(self._counts, np.int64), np.array(self._prompts, np.int64)
        at, outputs = np.array(self._at, np.int64), np.array(self._outputs, np.int64)
        if not ordered and (at[1:] < at[:-1]).any():
            order = np.argsort(at, kind="stable")
            starts = np.cumsum(counts) - counts
            turned = counts[order]
            within = np.arange(len(ids)) - np.repeat(np.cumsum(turned) - turned, turned)
            ids, counts, prompts = ids[np.repeat(starts[order], turned) + within], turned, prompts[order]
            at, outputs = at[order], outputs[order]
        trace = made_trace(ids, counts, prompts, self._block_tokens or 0, name=self._name, digest=digest)
        known: Ints = np.flatnonzero(counts)
        return Requests(trace, at[known], prompts[known], outputs[known])
