"""Arrivals drawn anew: what stays, what is drawn from what, and figures with the interval of many draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.planner.rows import SessionRow
from kvtape.sim.whatif.arrivals import has_choice, resampled
from kvtape.sim.whatif.confidence import interval, median
from kvtape.sim.whatif.grid import points_of
from kvtape.sim.whatif.pareto import mark_front
from kvtape.sim.whatif.processes import Processes
from kvtape.sim.whatif.rows import FIGURES, Draws
from kvtape.sim.whatif.sweep import Swept, sweep
from kvtape.sim.world.reading import read_scripts
from kvtape.sim.world.script import Script, Turn
from kvtape.sim.world.settings import Settings
from support.simulated import MemoryLog, flat_costs, play_two_turns, recorded_toy

COSTS = flat_costs(prefill=10_000, decode=100_000, evict=1)
GAPS = (0, 3_000_000, 9_000_000, 1_000_000, 20_000_000)

times = st.lists(st.integers(0, 10**15), min_size=1, max_size=12)
traffic = st.lists(times, min_size=1, max_size=8)


def scripts_at(sessions: Sequence[Sequence[int]]) -> tuple[Script, ...]:
    """One script for each list of turn times, with the gap before each turn as its think time."""
    found = []
    for i, given_ns in enumerate(sessions):
        at = sorted(given_ns)
        turns = [Turn(k + 1, t, 0 if k == 0 else t - at[k - 1], ()) for k, t in enumerate(at)]
        row = SessionRow(run_id="r", session_id=str(i), backend="toy", content=False)
        found.append(Script(row, tuple(turns), "close", 0, "native", 1))
    return tuple(found)


def starts(scripts: Sequence[Script]) -> list[int]:
    return sorted(s.turns[0].at_ns for s in scripts)


@given(traffic, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_in_an_open_loop_only_the_gaps_between_conversations_are_drawn(
    sessions: list[list[int]], seed: int, draw: int
) -> None:
    scripts = scripts_at(sessions)
    found = resampled(scripts, "open", seed, draw)
    assert found == resampled(scripts, "open", seed, draw)
    assert starts(found)[0] == starts(scripts)[0]
    assert {b - a for a, b in pairwise(starts(found))} <= {b - a for a, b in pairwise(starts(scripts))}
    by_start = sorted(range(len(scripts)), key=lambda i: scripts[i].turns[0].at_ns)
    assert starts(found) == [found[i].turns[0].at_ns for i in by_start]
    for old, new in zip(scripts, found, strict=True):
        by = new.turns[0].at_ns - old.turns[0].at_ns
        assert new == replace(old, turns=tuple(replace(t, at_ns=t.at_ns + by) for t in old.turns))


@given(traffic, st.integers(0, 2**64 - 1))
def test_in_a_closed_loop_think_times_are_drawn_too_from_all_of_the_log(sessions: list[list[int]], seed: int) -> None:
    scripts = scripts_at(sessions)
    found = resampled(scripts, "closed", seed, 0)
    pool = {t.think_ns for s in scripts for t in s.turns[1:]}
    assert {t.think_ns for s in found for t in s.turns[1:]} <= pool
    assert [t.at_ns for s in found for t in s.turns] == [
        t.at_ns for s in resampled(scripts, "open", seed, 0) for t in s.turns
    ]
    assert has_choice(scripts, "closed") or found == scripts


def test_gaps_come_in_runs_and_each_as_often_as_any_other() -> None:
    """The stationary bootstrap on 27 gaps: runs of 3 in the mean, every gap drawn alike."""
    n = 27
    scripts = scripts_at([[t] for t in np.cumsum([0, *range(1, n + 1)]).tolist()])
    drawn = [[b - a for a, b in pairwise(starts(resampled(scripts, "open", 5, k)))] for k in range(1000)]
    goes_on = np.mean([b == a % n + 1 for gaps in drawn for a, b in pairwise(gaps)])
    assert goes_on == pytest.approx(1 - 1 / 3 + 1 / 3 / n, abs=0.02)
    counts = np.bincount(np.ravel(drawn), minlength=n + 1)[1:]
    assert counts / counts.sum() == pytest.approx(np.full(n, 1 / n), abs=0.005)


def test_gaps_and_think_times_are_drawn_each_by_itself() -> None:
    """As many of both: drawn from one stream, the first of both would be the same of its list in every draw."""
    n, times = 50, [0]
    for i in range(n):
        times.append(times[-1] + 1000 + i)
    scripts = scripts_at([[at, at + 5000 + i] if i < n else [at] for i, at in enumerate(times)])
    together = 0
    for draw in range(40):
        found = resampled(scripts, "closed", 3, draw)
        gap = found[1].turns[0].at_ns - found[0].turns[0].at_ns - 1000
        together += gap == found[0].turns[1].think_ns - 5000
    assert together < 10


def test_draws_are_these_whatever_the_version_of_numpy() -> None:
    scripts = scripts_at([[t] for t in np.cumsum([0, *range(1, 9)]).tolist()])
    assert [b - a for a, b in pairwise(starts(resampled(scripts, "open", 7, 1)))] == [8, 3, 4, 3, 6, 6, 7, 8]


@given(st.lists(st.integers(-(10**18), 10**18) | st.floats(-1e9, 1e9), min_size=1, max_size=90))
def test_an_interval_has_values_that_occurred_and_leaves_five_in_a_hundred_out(values: list[float]) -> None:
    found, middle = interval(values), median(values)
    assert found is not None
    assert middle is not None
    assert {found["low"], found["high"], middle} <= set(values)
    assert found["low"] <= middle <= found["high"]
    assert sum(v < found["low"] for v in values) <= 0.025 * len(values)
    assert sum(v > found["high"] for v in values) <= 0.025 * len(values)
    assert 2 * sum(v < middle for v in values) < len(values) + 1
    if len(values) < 40:
        assert (found["low"], found["high"]) == (min(values), max(values))


def test_the_ends_of_an_interval_by_nearest_rank() -> None:
    assert interval(list(range(1, 201))) == {"low": 5, "high": 195, "mean": 100.5}
    assert interval(list(range(39, 0, -1))) == {"low": 1, "high": 39, "mean": 20.0}
    assert interval(list(range(1, 41))) == {"low": 1, "high": 39, "mean": 20.5}


def test_what_a_draw_lacks_has_neither_median_nor_interval() -> None:
    assert (median([1, None]), interval([1, None]), median([]), interval([])) == (None, None, None, None)


@pytest.fixture(scope="module")
def scripts() -> tuple[Script, ...]:
    """Six conversations that come at uneven times."""
    found = read_scripts(MemoryLog([recorded_toy(play_two_turns, session_id=str(i)) for i in range(6)]))
    at = np.cumsum([0, *GAPS]).tolist()
    return tuple(
        replace(s, turns=tuple(replace(t, at_ns=t.at_ns + at[i], think_ns=t.think_ns + 10**6 * i) for t in s.turns))
        for i, s in enumerate(found)
    )


def swept(scripts: tuple[Script, ...], draws: Draws, **more: Any) -> Swept:
    axes = {"policy": ["none:block=8", "stream:block=8"], "budget": [64], "slots": [2]}
    return sweep(scripts, COSTS, points_of(axes, Settings(arrivals="open")), draws=draws, **more)


def test_a_row_has_medians_and_intervals_and_how_often_it_is_on_the_front(scripts: tuple[Script, ...]) -> None:
    found = swept(scripts, Draws(5, 3))
    axes = {"policy": ["none:block=8", "stream:block=8"], "budget": [64], "slots": [2]}
    points = points_of(axes, Settings(arrivals="open"))
    alone = [sweep(resampled(scripts, "open", 3, k), COSTS, points).rows for k in range(5)]
    for i, row in enumerate(found.rows):
        for name in FIGURES:
            values = [rows[i][name] for rows in alone]
            assert (row[name], row["intervals"][name]) == (median(values), interval(values)), name
        assert row["pareto_share"] == sum(mark_front(rows)[i] for rows in alone) / 5
    spread = found.rows[0]["intervals"]["ttft_p95_ns"]
    assert spread["low"] < spread["high"]
    assert found.assumed == swept(scripts, Draws()).assumed


def test_as_recorded_there_is_no_interval(scripts: tuple[Script, ...]) -> None:
    rows = swept(scripts, Draws(1, 99)).rows
    assert {(row["intervals"], row["pareto_share"]) for row in rows} == {(None, None)}
    assert rows == swept(scripts, Draws()).rows


def test_another_seed_is_other_traffic_and_the_same_seed_the_same_anywhere(scripts: tuple[Script, ...]) -> None:
    found = swept(scripts, Draws(4, 1))
    assert found == swept(scripts, Draws(4, 1), executor=Processes(2))
    assert found.rows != swept(scripts, Draws(4, 2)).rows


def test_traffic_that_cannot_be_drawn_anew_is_named(scripts: tuple[Script, ...]) -> None:
    found = swept(scripts[:1], Draws(3, 0))
    assert any("nothing to draw anew" in text for text in found.assumed)
    assert all(i["low"] == i["high"] for row in found.rows for i in row["intervals"].values() if i is not None)
