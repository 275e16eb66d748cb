"""Layouts against a plain dict from tape position to cache position."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.planner import layout as lay
from kvtape.planner.layout import Layout, Segment
from kvtape.planner.ranges import RangeSet, digest_u64s


def as_dict(layout: Layout) -> dict[int, int]:
    return {s.tape_start + i: s.cache_start + i for s in layout for i in range(s.length)}


def from_dict(rows: dict[int, int]) -> Layout:
    return lay.normalise(Segment(tape, 1, cache) for tape, cache in rows.items())


# Any injective map of a small tape into a small cache, in any order.
rows_st = st.sets(st.integers(0, 14), max_size=10).flatmap(
    lambda tape: st.permutations(range(18)).map(lambda cache: dict(zip(sorted(tape), cache, strict=False)))
)
# The kind that engines make: a few runs.
runs_st = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 3)), max_size=4).map(
    lambda parts: _runs(parts)
)
layouts = st.one_of(rows_st, runs_st)


def _runs(parts: list[tuple[int, int, int]]) -> dict[int, int]:
    rows: dict[int, int] = {}
    tape = cache = 0
    for skip_tape, length, skip_cache in parts:
        tape, cache = tape + skip_tape, cache + skip_cache
        rows.update({tape + i: cache + i for i in range(length)})
        tape, cache = tape + length, cache + length
    return rows


def assert_normal(layout: Layout) -> None:
    for a, b in itertools.pairwise(layout):
        assert a.cache_stop <= b.cache_start
        assert not (a.cache_stop == b.cache_start and a.tape_stop == b.tape_start), "neighbours are merged"
    assert all(s.length > 0 for s in layout)


@given(layouts)
def test_normalise_keeps_every_row(rows: dict[int, int]) -> None:
    layout = from_dict(rows)
    assert as_dict(layout) == rows
    assert_normal(layout)
    assert lay.resident_ranges(layout) == RangeSet((t, t + 1) for t in rows)
    assert lay.next_cache_position(layout) == max(rows.values(), default=-1) + 1


@given(layouts, layouts)
def test_equal_digest_iff_equal_rows(left: dict[int, int], right: dict[int, int]) -> None:
    same = left == right
    assert (lay.layout_digest(from_dict(left)) == lay.layout_digest(from_dict(right))) == same


def test_the_digest_covers_the_segments_in_cache_order() -> None:
    appended = (Segment(0, 2, 0), Segment(4, 2, 2), Segment(2, 2, 4))
    assert lay.layout_digest(appended) == digest_u64s([0, 2, 0, 4, 2, 2, 2, 2, 4])
    in_place = lay.rank_layout(RangeSet([(0, 6)]))
    assert lay.resident_ranges(appended) == lay.resident_ranges(in_place)
    assert lay.layout_digest(appended) != lay.layout_digest(in_place)


@given(layouts, st.integers(0, 20), st.integers(0, 20))
def test_rows_between_counts_the_rows_of_a_cache_range(rows: dict[int, int], start: int, stop: int) -> None:
    assert lay.rows_between(from_dict(rows), start, stop) == sum(start <= c < stop for c in rows.values())


@given(layouts, st.integers(0, 16), st.integers(0, 16))
def test_run_start_knows_a_run_of_tape_and_cache(rows: dict[int, int], start: int, stop: int) -> None:
    at = rows.get(start)
    is_run = at is not None and start < stop and all(rows.get(t) == at + t - start for t in range(start, stop))
    assert lay.run_start(from_dict(rows), start, stop) == (at if is_run else None)


@given(layouts, st.integers(0, 16), st.integers(0, 16))
def test_remove(rows: dict[int, int], start: int, stop: int) -> None:
    left = lay.remove(from_dict(rows), start, stop)
    assert as_dict(left) == {t: c for t, c in rows.items() if not start <= t < stop}
    assert_normal(left)


@given(layouts, st.integers(0, 40))
def test_cut(rows: dict[int, int], tape_stop: int) -> None:
    assert as_dict(lay.cut(from_dict(rows), tape_stop)) == {t: c for t, c in rows.items() if t < tape_stop}


@given(layouts, st.integers(0, 16), st.integers(1, 4), st.integers(0, 20))
def test_append_adds_rows_or_refuses_an_overlap(rows: dict[int, int], tape: int, n: int, cache: int) -> None:
    new = {tape + i: cache + i for i in range(n)}
    if set(new) & set(rows) or set(new.values()) & set(rows.values()):
        with pytest.raises(ValueError, match="overlaps"):
            lay.append(from_dict(rows), tape, n, cache)
    else:
        after = lay.append(from_dict(rows), tape, n, cache)
        assert as_dict(after) == rows | new
        assert_normal(after)


@given(layouts, st.integers(0, 18), st.integers(0, 18), st.integers(-6, 6))
def test_shift_moves_rows_or_refuses(rows: dict[int, int], start: int, stop: int, delta: int) -> None:
    moved = {t: c + delta if start <= c < stop else c for t, c in rows.items()}
    if min(moved.values(), default=0) < 0 or len(set(moved.values())) < len(moved):
        with pytest.raises(ValueError, match=r"overlaps|bad segment"):
            lay.shift(from_dict(rows), start, stop, delta)
    else:
        after = lay.shift(from_dict(rows), start, stop, delta)
        assert as_dict(after) == moved
        assert_normal(after)


@given(layouts)
def test_rank_layout_is_a_fresh_prefill(rows: dict[int, int]) -> None:
    ranked = lay.rank_layout(lay.resident_ranges(from_dict(rows)))
    assert as_dict(ranked) == {t: i for i, t in enumerate(sorted(rows))}


def test_gap_and_rebased_as_drawn() -> None:
    gap = lay.remove(lay.rank_layout(RangeSet([(0, 8)])), 2, 4)
    assert gap == (Segment(0, 2, 0), Segment(4, 4, 4))
    assert lay.shift(gap, 4, 8, -2) == (Segment(0, 2, 0), Segment(4, 4, 2))


@given(layouts, st.integers(0, 14), st.integers(1, 4), st.none() | st.integers(0, 20))
def test_find_place_opens_room_before_the_first_later_row(
    rows: dict[int, int], start: int, n: int, preferred: int | None
) -> None:
    stop = start + n
    rows = {t: c for t, c in rows.items() if not start <= t < stop}
    place = lay.find_place(from_dict(rows), start, stop, preferred)
    opened = from_dict(rows)
    if place.delta:
        assert place.delta > 0
        opened = lay.shift(opened, place.shift_from, place.shift_stop, place.delta)
    after = as_dict(lay.append(opened, start, n, place.cache_start))
    order = sorted(after, key=lambda t: after[t])
    assert [t for t in order if not start <= t < stop] == sorted(rows, key=lambda t: rows[t]), "the others keep order"
    following = order[order.index(stop - 1) + 1 :]
    assert not following or following[0] >= stop, "right before a row that is later in the tape"
    before = order[: order.index(start)]
    assert all(t < start for t in before), "and before the first such row"
    if sorted(rows, key=lambda t: rows[t]) == sorted(rows):
        assert order == sorted(after), "tape order stays tape order"
