"""The page store against a dictionary of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtape.backends.reference.model.pages import PAGE, PageStore, paged

HEADS, DIM_K, DIM_V = 2, 3, 4
SPOTS = st.integers(0, 4 * PAGE)


def rows(positions: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows that say where they stand, and never repeat what stood there before."""
    rng = np.random.default_rng(positions)
    n = len(positions)
    keys, values = rng.standard_normal((n, HEADS, DIM_K)), rng.standard_normal((n, HEADS, DIM_V))
    return np.asarray(positions, np.int64), keys.astype(np.float32), values.astype(np.float32)


class PageMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = PageStore(HEADS, DIM_K, DIM_V, np.dtype(np.float32))
        self.model: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def _put(self, positions: list[int]) -> None:
        at, keys, values = rows(positions)
        self.store.put(at, keys, values)
        self.model.update({p: (keys[i], values[i]) for i, p in enumerate(positions)})

    @rule(gap=st.integers(0, 40), n=st.integers(1, 300))
    def append(self, gap: int, n: int) -> None:
        start = self.store.stop + gap
        at, keys, values = rows(list(range(start, start + n)))
        self.store.append(at, keys, values)
        self.model.update({start + i: (keys[i], values[i]) for i in range(n)})

    @rule(spots=st.sets(SPOTS, min_size=1, max_size=20))
    def put_where_free(self, spots: set[int]) -> None:
        free = sorted(spots - set(self.model))
        self._put(free) if free else None

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def put_where_taken_changes_nothing(self, data: st.DataObject) -> None:
        taken = data.draw(st.sampled_from(sorted(self.model)))
        with pytest.raises(ValueError, match="stands already"):
            self.store.put(*rows([taken, max(self.model) + 1]))

    @rule(start=SPOTS, n=st.integers(0, 400))
    def remove(self, start: int, n: int) -> None:
        self.store.remove(start, start + n)
        self.model = {p: row for p, row in self.model.items() if not start <= p < start + n}

    @rule(stop=SPOTS)
    def truncate(self, stop: int) -> None:
        self.store.truncate(stop)
        self.model = {p: row for p, row in self.model.items() if p < stop}
        assert self.store.stop <= max(stop, 0) or not self.model

    @rule(start=SPOTS)
    def drop_below(self, start: int) -> None:
        self.store.drop_below(start)
        self.model = {p: row for p, row in self.model.items() if p >= start}

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.model = {}
        assert self.store.allocated_bytes == 0

    @invariant()
    def holds_exactly_the_rows(self) -> None:
        assert self.store.n_rows == len(self.model)
        positions, keys, values = self.store.rows(0, 10**6)
        assert positions.tolist() == sorted(self.model)
        for i, p in enumerate(positions):
            np.testing.assert_array_equal(keys[i], self.model[int(p)][0])
            np.testing.assert_array_equal(values[i], self.model[int(p)][1])

    @invariant()
    def pages_show_the_rows_where_they_belong_and_zeros_elsewhere(self) -> None:
        pages = self.store.pages()
        assert pages.positions.tolist() == sorted(self.model)
        for p in sorted(self.model)[::50]:
            np.testing.assert_array_equal(pages.keys[:, p // PAGE - pages.first, p % PAGE], self.model[p][0])
        assert not pages.keys[:, ~pages.live].any()
        assert not pages.values[:, ~pages.live].any()


TestPages = PageMachine.TestCase
TestPages.settings = settings(max_examples=12, stateful_step_count=20)


def test_a_window_gives_pages_back() -> None:
    store = PageStore(HEADS, DIM_K, DIM_V, np.dtype(np.float32))
    store.append(*rows(list(range(5 * PAGE))))
    full = store.allocated_bytes
    store.drop_below(4 * PAGE + 7)
    assert store.n_rows == PAGE - 7
    assert store.allocated_bytes == full // 5
    assert store.row(4 * PAGE + 6) is None
    assert store.row(4 * PAGE + 7) is not None


def test_rows_come_behind_each_other() -> None:
    store = PageStore(HEADS, DIM_K, DIM_V, np.dtype(np.float32))
    store.append(*rows([3, 4]))
    with pytest.raises(ValueError, match="do not come behind"):
        store.append(*rows([4]))
    with pytest.raises(ValueError, match="ascend"):
        store.put(*rows([9, 8]))
    assert store.n_rows == 2


def test_paged_is_a_store_filled_once() -> None:
    at, keys, values = rows([2, PAGE + 1])
    pages = paged(at, keys, values)
    assert pages.positions.tolist() == [2, PAGE + 1]
    np.testing.assert_array_equal(pages.values[:, 1, 1], values[1])
