"""Derived budgets: the golden table, and what holds for every window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.planner.budget import DerivedBudget, derive_budget
from kvtape.planner.plan import BadBudget


@pytest.mark.parametrize(
    ("window", "swa", "block", "sink", "recent", "most", "valid"),
    [
        (2048, 0, 32, 128, 512, 2048, True),
        (2048, 512, 32, 32, 128, 512, True),
        (8192, 500, 32, 32, 128, 480, True),
        (400, 0, 1, 25, 100, 400, True),
        (4, 0, 1, 1, 1, 4, True),
        (64, 0, 32, 0, 64, 64, False),
        (4940, 0, 32, 320, 1248, 4928, True),
        # a sliding window that is not smaller changes nothing; one stands in for a window that is not given
        (512, 2048, 32, 32, 128, 512, True),
        (0, 512, 32, 32, 128, 512, True),
        (0, 0, 32, 0, 0, 0, False),
        (-5, 0, 32, 0, 0, 0, False),
        (127, 0, 32, 0, 127, 127, False),
        (128, 0, 32, 32, 32, 128, True),
    ],
)
def test_the_golden_table(window: int, swa: int, block: int, sink: int, recent: int, most: int, valid: bool) -> None:
    assert derive_budget(window, swa, block) == DerivedBudget(sink, recent, most, valid)


@given(st.integers(-10, 300_000), st.integers(-10, 300_000), st.integers(1, 600))
def test_a_valid_split_leaves_a_block_to_evict(window: int, swa: int, block: int) -> None:
    found = derive_budget(window, swa, block)
    if found.valid:
        assert found.sink % block == found.recent % block == found.max_tokens % block == 0
        assert min(found.sink, found.recent) >= block
        assert found.max_tokens >= found.sink + found.recent + block
        assert found.max_tokens <= max(window, swa)
    else:
        assert found.sink == 0
        assert found.recent == found.max_tokens < 4 * block


def test_a_block_is_at_least_one_token() -> None:
    with pytest.raises(BadBudget, match="block 0"):
        derive_budget(2048, 0, 0)
