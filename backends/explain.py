"""`explain()`: everything a session can say about itself, from the fold and the engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from kvtape.backends.parts import Parts
from kvtape.planner.ranges import RangeSet

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """A session's account. Ranges are tape positions `(start, stop)`; sizes in tokens or, where named, bytes."""

    fatal: str | None
    closed: bool
    policy: str
    n_ctx: int
    capabilities: dict[str, Any]
    ways: tuple[str, ...]
    prefix_length: int
    tape_length: int
    pending: int
    generation: int
    turn: int
    resident: list[tuple[int, int]]
    cold: list[tuple[int, int, int]]
    dropped: list[tuple[int, int]]
    forgotten: list[tuple[int, int]]
    layout: list[tuple[int, int, int]]
    last_plan: dict[str, Any] | None
    counters: dict[str, int]
    kv_bytes: dict[str, int]
    cold_bytes: int
    last_restore: dict[str, int] | None


def explain(parts: Parts, fatal_message: str | None, closed: bool, last_restore: dict[str, int] | None) -> Explanation:
    """`cold` is (block_id, start, stop); `forgotten` is what is below the prefix length and not resident;
    `layout` is (tape_start, length, cache_start); `pending` tokens wait behind the `tape_length` computed ones;
    `kv_bytes` is empty once the native context is gone."""
    state = parts.state
    ended = closed or fatal_message is not None
    return Explanation(
        fatal=fatal_message,
        closed=closed,
        policy=parts.policy.canonical,
        n_ctx=parts.n_ctx,
        capabilities=dataclasses.asdict(parts.capabilities),
        ways=tuple(str(w) for w in parts.ways),
        prefix_length=state.prefix_length,
        tape_length=state.tape_length,
        pending=parts.pending.n_tokens,
        generation=state.generation,
        turn=state.turn,
        resident=state.resident.as_pairs(),
        cold=[(b.block_id, b.start, b.stop) for b in state.cold],
        dropped=state.dropped.as_pairs(),
        forgotten=(RangeSet([(0, min(state.prefix_length, state.tape_length))]) - state.resident).as_pairs(),
        layout=[(s.tape_start, s.length, s.cache_start) for s in state.layout],
        last_plan=None if parts.last_plan is None else dataclasses.asdict(parts.last_plan),
        counters=dict(parts.journal.totals),
        kv_bytes={} if ended else parts.backend.kv_bytes(),
        cold_bytes=parts.cold.n_bytes if parts.cold is not None else 0,
        last_restore=last_restore,
    )
