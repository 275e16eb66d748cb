"""The cold store stays in its budget and gives up blocks in the stated order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.cold_store import ColdEntry, ColdStore
from kvtape.planner.blocks import CacheClass

ENTRY = st.builds(
    lambda n, c, used, start: (n, c, used, start),
    st.integers(1, 6),
    st.sampled_from(CacheClass),
    st.integers(0, 3),
    st.integers(0, 40),
)


@given(st.lists(ENTRY, max_size=20), st.integers(6, 20))
def test_budget_holds_and_the_newest_stays(entries: list[tuple[int, CacheClass, int, int]], budget: int) -> None:
    store = ColdStore(budget, budget_bytes=1000)
    alive: dict[int, ColdEntry] = {}
    for i, (n, cache_class, used, start) in enumerate(entries):
        entry = ColdEntry(i, start, start + n, cache_class, used, b"x" * n)
        store.put(entry)
        alive[i] = entry
        for gone in store.trim([i]):
            assert gone != i
            victim = alive.pop(gone)
            for other in alive.values():
                if other.block_id != i:
                    mine = (-victim.cache_class.rank, victim.last_used, victim.start)
                    assert mine <= (-other.cache_class.rank, other.last_used, other.start)
        assert store.n_tokens <= budget
        assert i in alive
        assert len(store) == len(alive)


def test_a_block_larger_than_the_budget_is_never_taken_in_silence() -> None:
    store = ColdStore(4)
    assert store.too_large(5, 0)
    with pytest.raises(ValueError, match="larger than the whole budget"):
        store.put(ColdEntry(0, 0, 5, CacheClass.VOLATILE, 0, b""))


def test_a_budget_of_nothing_is_no_store() -> None:
    with pytest.raises(ValueError, match="positive budget"):
        ColdStore(0)
