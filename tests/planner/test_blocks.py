"""Classes, flags, and segments that become blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.planner.blocks import (
    Block,
    BlockError,
    CacheClass,
    Flag,
    MissingRanges,
    PromptSegment,
    default_class,
    segments_to_blocks,
)
from kvtape.planner.ranges import Range

PINNED, MAP, VOLATILE = CacheClass.TASK_PINNED, CacheClass.REPO_MAP, CacheClass.VOLATILE


def segment(kind: str, n: int, **rest: object) -> PromptSegment:
    return PromptSegment(kind=kind, tokens=tuple(range(n)), **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "stable", "expected"),
    [
        ("system", False, PINNED),
        ("tools", False, PINNED),
        ("repo_rules", False, PINNED),
        ("repo_map", False, MAP),
        ("pinned", False, MAP),
        ("pinned", True, MAP),
        ("diff", False, VOLATILE),
        ("terminal", False, VOLATILE),
        ("user", False, VOLATILE),
        ("user", True, VOLATILE),
        ("assistant", False, VOLATILE),
        ("tool", False, VOLATILE),
        ("assistant_prompt", False, VOLATILE),
        ("notes", False, VOLATILE),
        ("notes", True, PINNED),
        ("", True, PINNED),
        ("  System\t", False, PINNED),
        ("REPO_MAP", False, MAP),
    ],
)
def test_the_class_of_a_kind(kind: str, stable: bool, expected: CacheClass) -> None:
    assert default_class(kind, stable) is expected
    assert PromptSegment(kind=kind, stable=stable).effective_class is expected


def test_classes_rank_from_the_most_protected() -> None:
    assert [c.rank for c in (PINNED, MAP, VOLATILE)] == [0, 1, 2]


def test_an_explicit_class_wins() -> None:
    assert segments_to_blocks([segment("system", 1, cache_class=VOLATILE)])[0].cache_class is VOLATILE


@pytest.mark.parametrize(
    ("cache_class", "flags", "protected"),
    [
        (VOLATILE, Flag(0), False),
        (MAP, Flag(0), False),
        (PINNED, Flag(0), True),
        (VOLATILE, Flag.PINNED, True),
        (VOLATILE, Flag.SINK, True),
        (VOLATILE, Flag.RECENT, True),
        (VOLATILE, Flag.RETRIEVED, False),
        (VOLATILE, Flag.RETRIEVED | Flag.SINK, True),
    ],
)
def test_what_protects_a_block(cache_class: CacheClass, flags: Flag, protected: bool) -> None:
    assert Block(0, 0, 4, "user", cache_class, flags).protected is protected


def test_blocks_are_cut_from_each_segments_start() -> None:
    blocks = segments_to_blocks(
        [segment("system", 40), segment("user", 32), segment("user", 0), segment("tool", 3)],
        first_id=5,
        at=100,
        last_used=9,
    )
    assert [(b.block_id, b.start, b.stop, b.kind, b.n_tokens) for b in blocks] == [
        (5, 100, 132, "system", 32),
        (6, 132, 140, "system", 8),
        (7, 140, 172, "user", 32),
        (8, 172, 175, "tool", 3),
    ]
    assert {(b.last_used, b.score, b.token_hash, b.flags) for b in blocks} == {(9, None, None, Flag(0))}


@given(st.lists(st.integers(0, 70), max_size=6), st.integers(1, 40), st.integers(0, 50))
def test_blocks_tile_what_was_tokenised(lengths: list[int], block: int, at: int) -> None:
    blocks = segments_to_blocks([segment("user", n) for n in lengths], block=block, at=at)
    end = at
    for b in blocks:
        assert b.start == end
        assert 1 <= b.n_tokens <= block
        end = b.stop
    assert end == at + sum(lengths)
    assert [b.block_id for b in blocks] == list(range(len(blocks)))
    assert len(blocks) == sum(-(-n // block) for n in lengths)


def test_bounds_place_a_segment_without_its_tokens() -> None:
    blocks = segments_to_blocks(
        [segment("system", 2), PromptSegment(kind="repo_map", bounds=Range(10, 14)), segment("user", 2)], block=3
    )
    assert [(b.start, b.stop) for b in blocks] == [(0, 2), (10, 13), (13, 14), (14, 16)]


@pytest.mark.parametrize(
    "skipped",
    [
        PromptSegment(kind="user", n_bytes=10),
        PromptSegment(kind="user", required=True),
        PromptSegment(kind="notes", stable=True),
    ],
)
def test_untokenised_segments_that_nobody_needs_are_skipped(skipped: PromptSegment) -> None:
    blocks = segments_to_blocks([segment("system", 2), skipped, segment("user", 3)])
    assert [(b.start, b.stop) for b in blocks] == [(0, 2), (2, 5)]


def test_missing_ranges_carry_the_blocks_whose_place_is_known() -> None:
    parts = [
        segment("system", 2),
        PromptSegment(kind="tools", n_bytes=700, required=True),
        segment("user", 3),
        PromptSegment(kind="user", bounds=Range(50, 52)),
        segment("assistant", 1),
        PromptSegment(kind="notes", n_bytes=1, stable=True),
    ]
    with pytest.raises(MissingRanges, match=r"1 \(tools, 700 bytes\), 5 \(notes, 1 bytes\)") as caught:
        segments_to_blocks(parts)
    assert caught.value.missing == (1, 5)
    assert [(b.block_id, b.start, b.stop) for b in caught.value.blocks] == [(0, 0, 2), (1, 50, 52), (2, 52, 53)]


@pytest.mark.parametrize(
    ("why", "parts", "block"),
    [
        ("begins before position 4", [segment("user", 4), PromptSegment(kind="user", bounds=Range(3, 6))], 32),
        ("4 tokens and bounds", [segment("user", 4, bounds=Range(0, 5))], 32),
        ("block size 0", [segment("user", 4)], 0),
    ],
)
def test_segments_that_cannot_be_blocks(why: str, parts: list[PromptSegment], block: int) -> None:
    with pytest.raises(BlockError, match=why):
        segments_to_blocks(parts, block=block)
