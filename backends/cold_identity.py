"""What a cold block is a copy of: written down when it leaves the cache, compared before an engine may see it again."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtape.backends.errors import StateRejected
from kvtape.backends.protocol import Backend

__all__ = ["BlockIdentity"]


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """Everything that must be the same when a block comes back.

    `tokens_hash`: BLAKE2b hex of the token ids; `n_bytes` and `state_hash` of the envelope; `layout`: what decides how
    an engine lays its rows out (engine, version, flash attention, options).
    """

    n_tokens: int
    tokens_hash: str
    n_bytes: int
    state_hash: str
    kv_types: str
    model: str
    layout: str

    @classmethod
    def of(cls, backend: Backend, tokens: Sequence[int], blob: bytes) -> BlockIdentity:
        """The identity of `blob` as a copy of `tokens` on this backend."""
        config = backend.config
        options = ",".join(f"{key}={value}" for key, value in sorted(config.options.items()))
        return cls(
            n_tokens=len(tokens),
            tokens_hash=_hash(np.asarray(tokens, "<i8").tobytes()),
            n_bytes=len(blob),
            state_hash=_hash(blob),
            kv_types=f"{config.kv_type_k}/{config.kv_type_v}",
            model=backend.facts.fingerprint,
            layout=f"{backend.name} {backend.engine_version} flash={config.flash_attention} {options}",
        )

    def require(self, now: BlockIdentity, block_id: int) -> None:
        """Raises StateRejected naming the first thing that differs in `now`."""
        for field in dataclasses.fields(self):
            was, is_now = getattr(self, field.name), getattr(now, field.name)
            if was != is_now:
                raise StateRejected(f"cold block {block_id}: {field.name} is {is_now!r}, it left with {was!r}")


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
