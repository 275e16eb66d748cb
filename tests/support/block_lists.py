"""Arbitrary resident blocks."""

from __future__ import annotations

from hypothesis import strategies as st

from kvtape.planner.blocks import Block, CacheClass, Flag

__all__ = ["block_lists"]


# Mostly volatile, as in a chat.
_CLASSES = [CacheClass.VOLATILE, CacheClass.VOLATILE, CacheClass.REPO_MAP, CacheClass.TASK_PINNED]


@st.composite
def block_lists(draw: st.DrawFn, scored: bool = False, gaps: bool = False) -> list[Block]:
    """Disjoint blocks, holes between some, ids unrelated to order, in any order; with `gaps` some lack a score."""
    shapes = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=12))
    ids = draw(st.permutations(range(len(shapes))))
    blocks: list[Block] = []
    at = 0
    for block_id, (skip, length) in zip(ids, shapes, strict=True):
        at += skip
        blocks.append(
            Block(
                block_id,
                at,
                at + length,
                "user",
                draw(
                    st.sampled_from(
                        [CacheClass.VOLATILE, CacheClass.VOLATILE, CacheClass.REPO_MAP, CacheClass.TASK_PINNED]
                    )
                ),
                draw(st.sampled_from([Flag(0), Flag(0), Flag.RETRIEVED, Flag.PINNED, Flag.SINK])),
                draw(st.integers(0, 3)),
                score=draw(st.sampled_from([0.0, 0.5, 1.0, *([None] if gaps else [])])) if scored else None,
            )
        )
        at += length
    return draw(st.permutations(blocks))
