"""The plan as one would write it down: the baseline of bench_plan.py, and what the tests hold the fast one to."""

from __future__ import annotations

from collections.abc import Iterable

from kvtape.planner.blocks import Block

__all__ = ["plain_plan"]


def plain_plan(
    blocks: Iterable[Block], *, budget: int, sink: int, recent: int, stream: bool, scored: bool
) -> tuple[list[int], list[int]]:
    """Ids of the kept and of the evicted blocks in tape order; blocks whole, every candidate with a score or none."""
    ordered = sorted(blocks, key=lambda b: (b.start, b.stop))
    end = ordered[-1].stop
    candidates = [b for b in ordered if not b.protected and b.start >= sink and b.stop <= end - recent]
    if stream:
        gone = {b.block_id for b in candidates}
    else:
        hot = sum(b.n_tokens for b in ordered)
        gone = set()

        def rank(b: Block) -> tuple[float, ...]:
            return (-b.cache_class.rank, (b.score or 0.0) if scored else 0.0, b.last_used, b.start, b.stop)

        for block in sorted(candidates, key=rank):
            if hot <= budget:
                break
            gone.add(block.block_id)
            hot -= block.n_tokens
    return [b.block_id for b in ordered if b.block_id not in gone], [b.block_id for b in ordered if b.block_id in gone]
