"""Derived budgets: the golden table, and what holds for every window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.planner.budget import DerivedBudget, derive_budget, ratio_budget
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


@pytest.mark.parametrize(
    ("n_tokens", "removed", "budget"), [(10, 0.9, 1), (10, 0.5, 5), (3, 0.5, 1), (2, 0.5, 1), (1, 0.0, 1), (7, 0.1, 6)]
)
def test_a_ratio_gives_a_budget(n_tokens: int, removed: float, budget: int) -> None:
    assert ratio_budget(n_tokens, removed) == budget


@pytest.mark.parametrize(("n_tokens", "removed"), [(1, 0.5), (1, 0.9), (2, 0.9), (3, 0.9), (0, 0.0)])
def test_a_budget_that_rounds_to_zero_is_refused(n_tokens: int, removed: float) -> None:
    with pytest.raises(BadBudget, match="rounds to zero"):
        ratio_budget(n_tokens, removed)


@pytest.mark.parametrize("removed", [-0.1, 1.0, 1.5, float("nan"), float("inf")])
def test_a_share_outside_zero_and_one_is_refused(removed: float) -> None:
    with pytest.raises(BadBudget, match=r"not in \[0, 1\)"):
        ratio_budget(10, removed)
