"""Tokens that stand for those a log does not have: drawn from block hashes, they keep which prompts begin alike.

Token i of a block with hash h is splitmix64(h + (i + 1) * 0x9E3779B97F4A7C15), modulo how many ids are allowed
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014). So equal blocks have equal tokens, and
two different ones agree in a token as rarely as chance has it. Tokens past the last listed block are the request's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # else whoever only draws tokens loads DuckDB
    from kvtape.traces.exporters.requests import PromptRequest

__all__ = ["block_tokens_of", "surrogate_prompt"]

Ints = npt.NDArray[np.int64]
_GOLDEN, _MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def block_tokens_of(block: int, n_tokens: int, allowed: Sequence[int] | Ints) -> Ints:
    """The first `n_tokens` tokens of the block with hash `block`, int64 `[n_tokens]`, all of them in `allowed`.

    `allowed`: the ids that may be drawn, for a model its vocabulary without special tokens. ValueError when empty.
    """
    if not len(allowed):
        raise ValueError("no token ids to draw from")
    z = np.uint64(block) + np.arange(1, n_tokens + 1, dtype=np.uint64) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z = z ^ (z >> np.uint64(31))
    return np.asarray(allowed, np.int64)[(z % np.uint64(len(allowed))).astype(np.int64)]


def surrogate_prompt(request: PromptRequest, allowed: Sequence[int]) -> Ints:
    """The whole prompt of a request, int64 `[n_tokens]`. A request without hashes shares nothing with any other."""
    size, ids = request.block_tokens or 1, np.asarray(allowed, np.int64)
    parts: list[Ints] = []
    done = 0
    for block in request.hashes or ():
        n = min(size, request.n_tokens - done)
        if n <= 0:
            break
        parts.append(block_tokens_of(block, n, ids))
        done += n
    if done < request.n_tokens:
        name = f"{request.session_id}\x00{request.seq}".encode()
        own = int.from_bytes(hashlib.blake2b(name, digest_size=8, person=b"kvtape own").digest())
        parts.append(block_tokens_of(own, request.n_tokens - done, ids))
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
