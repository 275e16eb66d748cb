"""Requests as lists of block ids: what every hit rate is computed from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtape.sim.blocks.errors import NoBlocks

__all__ = ["BlockTrace", "Ids", "Ints", "Requests", "index_kind", "made_trace"]

Ids = npt.NDArray[np.unsignedinteger[Any]]
Ints = npt.NDArray[np.signedinteger[Any]]


def index_kind(n: int) -> Any:
    """The integer type of arrays that count up to `n`: passes over them are bound by memory."""
    return np.int32 if n < 2**31 - 1 else np.int64


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """Requests in the order of their arrival, each a list of blocks from the first token on.

    `ids`: uint64, or uint32 where they fit [accesses]; equal ids are equal blocks (behind the same blocks:
    `rules.identity`). `tokens`: int32 or int64 [accesses], how many each block holds. `starts`: int64 [requests + 1],
    where each request begins in both.
    `name`, `digest`: of the source. `block_tokens`: tokens of a full block. `without_blocks`: requests left out since
    the source says nothing of their blocks.
    """

    ids: Ids
    tokens: Ints
    starts: Ints
    name: str
    digest: str
    block_tokens: int
    without_blocks: int = 0

    @property
    def n_requests(self) -> int:
        return len(self.starts) - 1

    @property
    def n_accesses(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Requests:
    """A trace with its times: `at_ns` int64 [requests], when each came; `prompts`, `outputs` int64 [requests], the
    tokens it brought and the tokens it was answered with.
    """

    trace: BlockTrace
    at_ns: Ints
    prompts: Ints
    outputs: Ints


def made_trace(
    ids: Ids,
    counts: Ints,
    prompts: Ints,
    block_tokens: int,
    *,
    name: str,
    digest: str,
) -> BlockTrace:
    """From the ids of all requests one behind the other, how many each has, and the tokens of its prompt.

    All blocks but a partial last one are full; a list that leaves the partial block out counts its listed blocks
    only. Requests without ids are left out and counted. Raises NoBlocks when that leaves none.
    """
    with_blocks = counts > 0
    if not with_blocks.any():
        raise NoBlocks(
            f"{name}: no request in it has block ids, so nobody can say what its prompts share; "
            f"a curve needs a recorded log or a trace with ids (mooncake, bailian, ...)"
        )
    left_out = int((~with_blocks).sum())
    counts, prompts = counts[with_blocks], prompts[with_blocks]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    tokens = np.full(int(starts[-1]), block_tokens, index_kind(block_tokens))
    tokens[starts[1:] - 1] = np.clip(prompts - (counts - 1) * block_tokens, 1, block_tokens)
    return BlockTrace(ids, tokens, starts, name, digest, block_tokens, left_out)
