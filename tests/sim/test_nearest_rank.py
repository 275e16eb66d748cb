"""Quantiles of the figures: values that occurred, by nearest rank."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from kvtape.sim.nearest_rank import nearest_rank
from kvtape.sim.world.measures import Counter, TurnResult, summary


@given(st.fractions(0, 1), st.integers(1, 300))
def test_the_index_is_the_first_that_so_many_do_not_exceed(share: Fraction, n: int) -> None:
    assert nearest_rank(share, n) == next(i for i in range(n) if Fraction(i + 1, n) >= share)


def test_figures_are_of_their_quantile() -> None:
    turns = [TurnResult("s", i, 0, 2 * i, 3 * i, 9 * i, 5 * i, 1, "served") for i in range(20, 0, -1)]
    found = summary(turns, Counter(), {})
    names = ("ttft_p50_ns", "ttft_p95_ns", "tpot_p50_ns", "tpot_p95_ns", "latency_p50_ns", "latency_p95_ns")
    assert [found[name] for name in (*names, "queued_p95_ns")] == [30, 57, 50, 95, 90, 171, 38]
