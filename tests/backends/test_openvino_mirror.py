"""The host's rows against a plain list of them, and rows as bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtape.backends.envelope import unwrap, wrap
from kvtape.backends.errors import StateRejected
from kvtape.backends.openvino.graph import GraphShape
from kvtape.backends.openvino.mirror import Rows
from kvtape.backends.openvino.saved import pack, unpack
from kvtape.planner.layout import Segment, normalise

SHAPE = GraphShape(layers=2, heads=2, kv_heads=1, head_dim_k=4, head_dim_v=2, n_vocab=100)
IDENTITY = {"engine": "openvino", "fingerprint": "tiny"}


def empty(*, mirror: bool = True) -> Rows:
    return Rows.empty(SHAPE.layers, SHAPE.kv_heads, SHAPE.head_dim_k, SHAPE.head_dim_v, mirror=mirror)


def kv(marks: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values that carry the mark of their row in every component."""
    rows = np.array(marks, np.float32)[None, :, None, None]
    return np.tile(rows, (2, 1, 1, 4)), np.tile(rows + 0.5, (2, 1, 1, 2))


def appended(rows: Rows, tape: list[int], cache: list[int]) -> Rows:
    at = np.array(tape, np.int64)
    return rows.append(at, np.array(cache, np.int64), at % 100, *kv(tape))


def rows_of(tape: list[int]) -> Rows:
    return appended(empty(), tape, list(range(len(tape))))


class RowsMachine(RuleBasedStateMachine):
    """Rows beside a list of (tape, cache, origin); older `Rows` stay what they were whatever newer ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = empty()
        self.model: list[tuple[int, int, int]] = []
        self.kept: list[tuple[Rows, list[tuple[int, int, int]]]] = []
        self.next_tape = 0

    @rule(n=st.sampled_from([1, 2, 17, 300]))  # a buffer grows by 256 rows
    def append(self, n: int) -> None:
        at = self.rows.next_cache_position
        tape = list(range(self.next_tape, self.next_tape + n))
        self.next_tape += n
        self.rows = appended(self.rows, tape, [at + i for i in range(n)])
        self.model += [(t, at + i, at + i) for i, t in enumerate(tape)]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(self.model) - 1))
        stop = data.draw(st.integers(start, len(self.model)))
        self.rows = self.rows.without(slice(start, stop))
        del self.model[start:stop]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), by=st.integers(1, 5))
    def move_tail(self, data: st.DataObject, by: int) -> None:
        first = data.draw(st.integers(0, len(self.model) - 1))
        cache = np.array([c + (by if i >= first else 0) for i, (_, c, _) in enumerate(self.model)], np.int64)
        self.rows = self.rows.at_cache(cache)
        self.model = [(t, int(cache[i]), o) for i, (t, _, o) in enumerate(self.model)]

    @precondition(lambda self: len(self.kept) < 3)
    @rule()
    def keep(self) -> None:
        self.kept.append((self.rows, list(self.model)))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        self.rows, model = data.draw(st.sampled_from(self.kept))
        self.model = list(model)

    @invariant()
    def same(self) -> None:
        for rows, model in [*self.kept, (self.rows, self.model)]:
            assert list(zip(rows.tape, rows.cache, rows.origin, strict=True)) == model
            keys, values = kv([t for t, _, _ in model])
            np.testing.assert_array_equal(rows.keys, keys)
            np.testing.assert_array_equal(rows.values, values)
            assert rows.layout() == normalise(Segment(t, 1, c) for t, c, _ in model)


RowsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
TestRows = RowsMachine.TestCase


@given(st.sets(st.integers(0, 30), min_size=2), st.data())
def test_merging_puts_rows_back_where_they_were(tape: set[int], data: st.DataObject) -> None:
    rows = rows_of(sorted(tape))
    start = data.draw(st.integers(0, len(tape) - 1))
    stop = data.draw(st.integers(start + 1, len(tape)))
    away = rows.take(np.arange(start, stop))
    back = rows.without(slice(start, stop)).merged(away)
    assert back.layout() == rows.layout()
    np.testing.assert_array_equal(back.keys, rows.keys)
    np.testing.assert_array_equal(back.values, rows.values)


def test_a_run_is_contiguous_in_tape_and_cache() -> None:
    rows = appended(appended(empty(), [0, 1, 2, 7, 8], [0, 1, 2, 3, 4]), [9, 3], [6, 7])
    assert rows.run(0, 3) == slice(0, 3)
    assert rows.run(7, 9) == slice(3, 5)
    assert rows.run(3, 4) == slice(6, 7)
    for start, stop in ((2, 8), (7, 10), (0, 4), (5, 6), (3, 3), (9, 11)):
        assert rows.run(start, stop) is None


def test_rows_without_a_host_copy_keep_books_only() -> None:
    rows = appended(empty(mirror=False), [0, 1, 2], [0, 1, 2])
    assert rows.kv is None
    assert rows.take(np.array([0, 2])).tape.tolist() == [0, 2]
    with pytest.raises(AssertionError):
        _ = rows.keys


@given(st.lists(st.integers(0, 99), max_size=6, unique=True))
def test_rows_survive_their_bytes(tape: list[int]) -> None:
    rows = rows_of(tape)
    back = unpack("block", IDENTITY, SHAPE, pack("block", IDENTITY, rows))
    for name in ("tape", "cache", "tokens", "origin", "keys", "values"):
        np.testing.assert_array_equal(getattr(back, name), getattr(rows, name))


def test_bytes_of_another_kind_or_model_are_refused() -> None:
    blob = pack("block", IDENTITY, rows_of([0, 1]))
    with pytest.raises(StateRejected, match="kind 'block'"):
        unpack("snapshot", IDENTITY, SHAPE, blob)
    with pytest.raises(StateRejected, match="fingerprint 'tiny'"):
        unpack("block", IDENTITY | {"fingerprint": "other"}, SHAPE, blob)


@pytest.mark.parametrize("at", [0, 9, 40, 200, -40, -1])
def test_a_flipped_bit_is_refused(at: int) -> None:
    blob = bytearray(pack("block", IDENTITY, rows_of([0, 1, 2, 3])))
    blob[at] ^= 4
    with pytest.raises(StateRejected):
        unpack("block", IDENTITY, SHAPE, bytes(blob))


def _edited(change: Any) -> bytes:
    """A block of two rows in a valid envelope whose payload, as int64, was changed."""
    header, payload = unwrap(pack("block", IDENTITY, rows_of([4, 5])), {})
    words = np.frombuffer(payload, "<i8").copy()
    return wrap(header, change(words, header))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda w, h: w.tobytes()[:-4], "payload bytes"),
        (lambda w, h: w.tobytes() + b"\0" * 4, "payload bytes"),
        (lambda w, h: h.update(n_rows=3) or w.tobytes(), "payload bytes"),
        (lambda w, h: h.update(n_rows=-1) or w.tobytes(), "n_rows"),
        (lambda w, h: h.update(n_rows="2") or w.tobytes(), "n_rows"),
        (lambda w, h: w.__setitem__(1, 4) or w.tobytes(), "tape position twice"),
        (lambda w, h: w.__setitem__(3, 0) or w.tobytes(), "cache position twice"),
        (lambda w, h: w.__setitem__(0, -4) or w.tobytes(), "cannot be"),
        (lambda w, h: w.__setitem__(4, 100) or w.tobytes(), "cannot be"),
        (lambda w, h: w.__setitem__(7, -1) or w.tobytes(), "cannot be"),
        (lambda w, h: w.__setitem__(2, 9) or w.tobytes(), "cache order"),
        (lambda w, h: w.__setitem__(9, 0x7FC00000) or w.tobytes(), "not finite"),
    ],
)
def test_rows_that_cannot_be_are_refused(change: Any, why: str) -> None:
    with pytest.raises(StateRejected, match=why):
        unpack("block", IDENTITY, SHAPE, _edited(change))
