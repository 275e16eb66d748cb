"""The cold store stays in its budget and gives up blocks in the stated order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.asked import check_sizes
from kvtape.backends.cold_identity import BlockIdentity
from kvtape.backends.cold_store import ColdEntry, ColdStore, open_store
from kvtape.backends.errors import UsageError
from kvtape.backends.protocol import SessionConfig
from kvtape.planner.blocks import CacheClass
from support.toys import toy_backend

ENTRY = st.builds(
    lambda n, c, used, start: (n, c, used, start),
    st.integers(1, 6),
    st.sampled_from(CacheClass),
    st.integers(0, 3),
    st.integers(0, 40),
)


def cold_entry(
    block_id: int, start: int, n: int, cache_class: CacheClass = CacheClass.VOLATILE, used: int = 0, *, n_bytes: int = 1
) -> ColdEntry:
    blob = b"x" * n_bytes
    return ColdEntry(
        block_id, start, start + n, cache_class, used, blob, BlockIdentity.of(toy_backend(), [5] * n, blob)
    )


@given(st.lists(ENTRY, max_size=20), st.integers(6, 20), st.integers(18, 60))
def test_both_budgets_hold_and_the_newest_stays(
    entries: list[tuple[int, CacheClass, int, int]], budget: int, bound: int
) -> None:
    """It is dropped only while something is over, in the stated order, and never the block just inserted."""
    store = ColdStore(budget, budget_bytes=bound)
    alive: dict[int, ColdEntry] = {}
    for i, (n, cache_class, used, start) in enumerate(entries):
        entry = cold_entry(i, start, n, cache_class, used, n_bytes=3 * n)
        store.put(entry)
        alive[i] = entry
        for gone in store.trim(i):
            assert gone != i
            assert sum(e.n_tokens for e in alive.values()) > budget or sum(len(e.blob) for e in alive.values()) > bound
            victim = alive.pop(gone)
            for other in alive.values():
                if other.block_id != i:
                    mine = (-victim.cache_class.rank, victim.last_used, victim.start)
                    assert mine <= (-other.cache_class.rank, other.last_used, other.start)
        assert store.n_tokens <= budget
        assert store.n_bytes <= bound
        assert i in alive
        assert len(store) == len(alive)


def test_a_block_larger_than_the_budget_is_never_taken_in_silence() -> None:
    store = ColdStore(4)
    assert store.too_large(5, 0)
    with pytest.raises(ValueError, match="larger than the whole budget"):
        store.put(cold_entry(0, 0, 5))
    assert ColdStore(4, 2).too_large(4, 3)
    with pytest.raises(ValueError, match="larger than the whole budget"):
        ColdStore(4, 2).put(cold_entry(0, 0, 4, n_bytes=3))


def test_what_a_session_asks_for_is_its_store() -> None:
    assert open_store(SessionConfig()) is None
    store = open_store(SessionConfig(cold_budget_tokens=7, cold_budget_bytes=99))
    assert store is not None
    assert (store.budget_tokens, store.budget_bytes) == (7, 99)
    unbounded = open_store(SessionConfig(cold_budget_tokens=7))
    assert unbounded is not None
    assert unbounded.budget_bytes is None
    with pytest.raises(UsageError, match="cold_budget_bytes without cold_budget_tokens"):
        check_sizes(SessionConfig(cold_budget_bytes=1))
    with pytest.raises(UsageError, match="cold_budget_bytes is -1"):
        check_sizes(SessionConfig(cold_budget_tokens=1, cold_budget_bytes=-1))


def test_a_budget_of_nothing_is_no_store() -> None:
    with pytest.raises(ValueError, match="positive budget"):
        ColdStore(0)
