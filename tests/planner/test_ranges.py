"""RangeSet against Python's own sets of integers."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtape.planner.ranges import Range, RangeSet, digest_u64s

UNIVERSE = 40
pairs = st.tuples(st.integers(0, UNIVERSE), st.integers(0, UNIVERSE)).map(lambda p: (min(p), max(p)))
pair_lists = st.lists(pairs, max_size=8)


def members(ranges: list[tuple[int, int]] | RangeSet) -> set[int]:
    spans = ranges.as_pairs() if isinstance(ranges, RangeSet) else ranges
    return {p for start, stop in spans for p in range(start, stop)}


@given(pair_lists)
def test_a_set_is_sorted_disjoint_apart_and_holds_what_went_in(spans: list[tuple[int, int]]) -> None:
    found = RangeSet(spans)
    assert members(found) == members(spans)
    assert all(len(r) > 0 for r in found)
    assert all(a.stop < b.start for a, b in zip(found.ranges, found.ranges[1:], strict=False))
    assert found.n_tokens == len(members(spans))
    assert bool(found) == bool(members(spans))
    assert [p in found for p in range(UNIVERSE + 1)] == [p in members(spans) for p in range(UNIVERSE + 1)]


@given(pair_lists, pair_lists)
def test_the_algebra_is_that_of_sets(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    a, b = RangeSet(left), RangeSet(right)
    assert members(a | b) == members(left) | members(right)
    assert members(a & b) == members(left) & members(right)
    assert members(a - b) == members(left) - members(right)
    assert a.issubset(b) == (members(left) <= members(right))
    for made in (a | b, a & b, a - b):
        assert made == RangeSet(made.as_pairs()), "the result is normalised"


@given(pair_lists, pair_lists)
def test_equality_hash_and_digest_say_the_same(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    a, b = RangeSet(left), RangeSet(right)
    same = members(left) == members(right)
    assert (a == b) == same
    assert (a.digest() == b.digest()) == same
    if same:
        assert hash(a) == hash(b)


@given(pairs, pairs)
def test_overlap_is_strict(left: tuple[int, int], right: tuple[int, int]) -> None:
    assert Range(*left).overlaps(Range(*right)) == bool(members([left]) & members([right]))


def test_the_digest_is_blake2b_8_over_little_endian_pairs() -> None:
    raw = hashlib.blake2b(struct.pack("<4Q", 0, 4, 10, 12), digest_size=8).digest()
    assert RangeSet([(10, 12), (0, 4)]).digest() == int.from_bytes(raw, "little")
    assert digest_u64s([2**64 - 1]) == int.from_bytes(hashlib.blake2b(b"\xff" * 8, digest_size=8).digest(), "little")


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (-2, -1)])
def test_a_range_that_is_none_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="bad range"):
        Range(start, stop)


@given(pair_lists, st.tuples(st.integers(-3, UNIVERSE), st.integers(-3, UNIVERSE)))
@example([(0, 10)], (5, 3))
@example([], (-1, -1))
def test_a_set_refuses_a_bad_pair_wherever_it_stands(spans: list[tuple[int, int]], pair: tuple[int, int]) -> None:
    if 0 <= pair[0] <= pair[1]:
        assert members(RangeSet([*spans, pair])) == members([*spans, pair])
    else:
        with pytest.raises(ValueError, match="bad range"):
            RangeSet([*spans, pair])


def test_an_empty_range_is_a_value_but_in_no_set() -> None:
    assert len(Range(5, 5)) == 0
    assert RangeSet([Range(5, 5)]) == RangeSet()
    assert not Range(5, 5).overlaps(Range(0, 10))
