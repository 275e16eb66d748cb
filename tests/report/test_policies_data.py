"""Points of what-ifs as a report shows them: the front is what nothing beats, and no policy passes a bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.report.data import policies
from kvtape.report.data.policies import comparisons
from kvtape.report.data.runs import OBJECTIVES
from kvtape.report.given.reading import Given, Named
from kvtape.report.given.shapes import Interval, SimulatedRow, Whatif
from kvtape.sim.whatif.pareto import mark_front

FIGURES = tuple(OBJECTIVES)


def row(**changes: Any) -> SimulatedRow:
    base = SimulatedRow(
        policy="stream:sink=4,recent=60",
        budget=64,
        slots=None,
        cold_tokens=None,
        block=None,
        clairvoyant=False,
        error=None,
        turns=2,
        not_served=0,
        ttft_p50_ns=5,
        ttft_p95_ns=10,
        tpot_p95_ns=3,
        peak_kv_bytes=2**20,
        prefilled_tokens=100,
        recomputed_tokens=20,
        forgotten_tokens=0,
        evicted_tokens=7,
        retained_mass=0.5,
        opt_retained_mass=0.75,
        opt_prefilled_tokens=90,
        intervals=None,
    )
    return replace(base, **changes)


def whatif(*rows: SimulatedRow, **changes: Any) -> Whatif:
    base = Whatif(
        rows=rows,
        objectives={"ttft_p95_ns": "less"},
        rules={},
        assumed=(),
        source_digest="0" * 64,
        costs_digest="1" * 64,
        config_digest="2" * 64,
        seeds=1,
        seed=None,
        hypothetical=False,
    )
    return replace(base, **changes)


def given_of(*found: Any) -> Given:
    return Given(tuple(Named("w.json", value) for value in found))


@given(st.lists(st.tuples(*[st.integers(0, 3)] * len(FIGURES), st.booleans()), min_size=1, max_size=8))
def test_the_front_of_runs_is_what_no_other_beats(drawn: list[tuple[int, ...]]) -> None:
    rows = [dict(zip((*FIGURES, "clairvoyant"), values, strict=True)) | {"not_served": 0} for values in drawn]
    real = [r for r in rows if not r["clairvoyant"]]

    def beaten(one: dict[str, int]) -> bool:
        better = [all(r[n] <= one[n] for n in FIGURES) and any(r[n] < one[n] for n in FIGURES) for r in real]
        return any(better)

    assert mark_front(rows, OBJECTIVES) == [not r["clairvoyant"] and not beaten(r) for r in rows]


@given(
    st.integers(0, 200), st.integers(0, 50), st.integers(0, 200), st.floats(0, 1), st.floats(0, 1), st.integers(0, 1)
)
def test_who_passes_a_bound_is_named(paid: int, again: int, least: int, kept: float, most: float, missed: int) -> None:
    """A turn that was not served was not paid for either, so such a point proves nothing of the bound on tokens."""
    made = row(prefilled_tokens=paid, recomputed_tokens=again, opt_prefilled_tokens=least, not_served=missed)
    (found,) = comparisons(given_of(whatif(replace(made, retained_mass=kept, opt_retained_mass=most))))
    below = not missed and paid + again < least
    assert len(found.broken_bounds) == below + (kept > most + 1e-9)
    assert found.points[0].computed == paid + again


def test_a_point_that_cannot_be_is_told_apart_and_intervals_stay_with_their_figure() -> None:
    figures = dict.fromkeys(("ttft_p50_ns", "peak_kv_bytes", "turns", "not_served"))
    drawn = row(intervals={"ttft_p95_ns": Interval(8, 14), "retained_mass": None}, pareto=True, pareto_share=0.9)
    (found,) = comparisons(given_of(whatif(drawn, row(error="too small", **figures), seeds=40, seed=3)))
    (point,) = found.points
    assert (point.ttft_p95.low, point.ttft_p95.value, point.ttft_p95.high) == (8, 10, 14)
    assert (point.retained.low, point.retained.value) == (None, 0.5)
    assert (point.on_front, point.front_share, found.draws, found.seed) == (True, 0.9, 40, 3)
    assert [(r.budget, r.why) for r in found.refused] == [(64, "too small")]


def test_the_small_session_of_the_demo_is_a_comparison_of_its_own() -> None:
    notes = whatif(row(budget=32))
    found = comparisons(given_of(whatif(row(), notes=notes)))
    assert [(c.source, [p.budget for p in c.points]) for c in found] == [("w.json", [64]), ("w.json", [32])]
    assert found[0].about != found[1].about


def test_of_too_many_points_the_front_stays_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "MOST_POINTS", 3)
    rows = [row(budget=i, pareto=i == 5) for i in range(6)] + [row(error="no")] * 4
    (found,) = comparisons(given_of(whatif(*rows)))
    assert [p.budget for p in found.points] == [5, 0, 1]
    assert (len(found.refused), found.left_out) == (3, (3, 1))


@pytest.mark.parametrize("given_nothing", [Given(), given_of()], ids=["none", "empty"])
def test_nothing_given_is_nothing_to_compare(given_nothing: Given) -> None:
    assert comparisons(given_nothing) == ()
