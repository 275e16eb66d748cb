"""Hit rates of policies at budgets: each policy by the quickest way that is exact under the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvtape.sim.blocks.accesses import Accesses, Workload
from kvtape.sim.blocks.arrival import Fifos
from kvtape.sim.blocks.block_trace import BlockTrace
from kvtape.sim.blocks.clairvoyant import Intervals, hits_of, intervals_held, intervals_single, kept
from kvtape.sim.blocks.errors import CurveError
from kvtape.sim.blocks.every_budget import least_rooms
from kvtape.sim.blocks.measure import Measure
from kvtape.sim.blocks.policies.registry import PolicyChoice
from kvtape.sim.blocks.policies.running import run_policy
from kvtape.sim.blocks.recency import NEVER
from kvtape.sim.blocks.recent import least_budgets, rooms_short_by_one
from kvtape.sim.blocks.rules import Rules

__all__ = ["Curve", "Point", "default_budgets", "sweep"]

_FIRST_BUDGET = 16
"""Where a default sweep of a large trace begins: 8 thousand tokens in blocks of 512."""


@dataclass(frozen=True, slots=True)
class Point:
    """`filled`: whether the warm-up brought more blocks than the budget holds, or as many."""

    policy: str
    budget_blocks: int
    hit_rate: float
    hits: int
    filled: bool


@dataclass(frozen=True, slots=True)
class Curve:
    """`ceiling`: the hit rate of a cache without end. `total`: tokens or blocks that were measured. `n_blocks`:
    distinct blocks. `omitted`: budgets that the rules leave out since the warm-up does not fill them.
    """

    rules: Rules
    points: list[Point]
    ceiling: float
    total: int
    n_blocks: int
    measured_requests: int
    omitted: list[int]


def default_budgets(n_blocks: int) -> list[int]:
    """Powers of two below the number of distinct blocks, and that number: no cache needs more."""
    budget = _FIRST_BUDGET if n_blocks > _FIRST_BUDGET**2 else 1
    budgets = []
    while budget < n_blocks:
        budgets.append(budget)
        budget *= 2
    return [*budgets, n_blocks]


def sweep(
    trace: BlockTrace,
    rules: Rules,
    policies: Sequence[PolicyChoice],
    budgets: Sequence[int] | Literal["all"] | None = None,
    *,
    progress: Callable[[int, int, str], None] | None = None,
) -> Curve:
    """Rows by policy in the order given, then by budget. Budgets are in blocks; None takes `default_budgets`.

    `all` has lru and opt only, whose hits at every budget come out of one pass: a row wherever the hits change.
    Raises CurveError for a budget below 1, or when nothing is left to measure; PolicyBroken.
    """
    work = Workload(trace, rules)
    if budgets == "all":
        return _every(trace, work, rules, policies)
    wanted = sorted(set(budgets)) if budgets is not None else default_budgets(work.n_blocks)
    if not wanted or wanted[0] < 1:
        raise CurveError(f"budget {wanted[0] if wanted else '(none)'}: a cache holds at least one block")
    first = _first(work, rules)
    filled = first.filled
    omitted = [b for b in wanted if b > filled] if rules.underfilled == "omit" else []
    wanted = [b for b in wanted if b not in omitted]
    if not wanted:
        raise CurveError(
            f"{trace.name}: not one budget is full when measuring begins, after {filled} blocks; "
            f"take smaller budgets, or rules that keep such ({rules.name} leaves them out)"
        )
    measure = Measure(first, rules)
    points: list[Point] = []
    for choice in policies:
        hits: dict[int, int] = {}
        for budget, n in _hits(work, first, rules, measure, choice, wanted):
            hits[budget] = n
            if progress is not None:
                progress(len(points) + len(hits), len(policies) * len(wanted), choice.name)
        points += [Point(choice.name, b, measure.rate(hits[b]), hits[b], b <= filled) for b in wanted]
    return _curve(work, first, rules, measure, points, omitted)


def _curve(
    work: Workload, a: Accesses, rules: Rules, measure: Measure, points: list[Point], omitted: list[int]
) -> Curve:
    return Curve(
        rules=rules,
        points=points,
        ceiling=measure.rate(measure.hits(a.before >= 0)),
        total=measure.total,
        n_blocks=work.n_blocks,
        measured_requests=a.n_requests - a.warmup,
        omitted=omitted,
    )


def _every(trace: BlockTrace, work: Workload, rules: Rules, policies: Sequence[PolicyChoice]) -> Curve:
    first = _first(work, rules)
    filled, measure = first.filled, Measure(first, rules)
    last = filled if rules.underfilled == "omit" else work.n_blocks
    points: list[Point] = []
    for choice in policies:
        if choice.name not in ("lru", "opt"):
            raise CurveError(
                f"policy {choice.name}: no pass gives it all budgets at once; name some, or take lru and opt"
            )
        for budget, hits in _steps(work, first, rules, measure, choice):
            if budget <= last:
                points.append(Point(choice.name, budget, measure.rate(hits), hits, budget <= filled))
    return _curve(work, first, rules, measure, points, [])


def _first(work: Workload, rules: Rules) -> Accesses:
    """The accesses in the order of the rules."""
    return work.root_first if rules.order == "root_first" else work.root_last


def _intervals(a: Accesses, rules: Rules) -> Intervals:
    return intervals_held(a) if rules.in_flight == "held" else intervals_single(a, bypass=rules.bypass)


def _steps(
    work: Workload, a: Accesses, rules: Rules, measure: Measure, choice: PolicyChoice
) -> Iterator[tuple[int, int]]:
    """(budget, hits) at the budgets where the hits change, rising."""
    if choice.name == "opt":
        intervals = _intervals(a, rules)
        rooms = least_rooms(intervals)
        least = np.where(rooms < 0, NEVER, np.maximum(rooms + intervals.spare, 1))
        at, hits = measure.hits_by_budget(least)
        yield from zip(at.tolist(), hits.tolist(), strict=True)
        return
    lru = _Lru(work, a, rules)
    budgets = {*lru.at.tolist(), *(range(1, lru.longest + 1) if rules.overlong == "minus_one" else ())}
    before = 0
    for budget in sorted(budgets):
        n = lru.hits(budget)
        if n != before:
            yield budget, n
        before = n


def _hits(
    work: Workload, a: Accesses, rules: Rules, measure: Measure, choice: PolicyChoice, budgets: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """(budget, hits) in any order."""
    if choice.name == "lru":
        lru = _Lru(work, a, rules)
        for budget in budgets:
            yield budget, lru.hits(budget)
        return
    if choice.name == "opt":
        intervals = _intervals(a, rules)
        for budget, count in kept(intervals, budgets):
            yield budget, measure.hits(hits_of(intervals, count))
        return
    held = rules.in_flight == "held"
    fifos = Fifos(a, held=held) if choice.name == "fifo" else None
    for budget in budgets:
        found = run_policy(choice, a, budget, held=held) if fifos is None else fifos.hits(budget)
        yield budget, measure.hits(found)


class _Lru:
    """LRU at any budget, out of one pass. `at`: where its hits change, but for requests that are overlong."""

    def __init__(self, work: Workload, a: Accesses, rules: Rules) -> None:
        held = rules.in_flight == "held"
        self._a = a = work.root_last if held else a
        self._measure, self._short_by_one = Measure(a, rules), rules.overlong == "minus_one"
        self._least = least_budgets(a, held=held)
        self.longest = int(np.diff(a.starts).max())
        """Blocks of the longest request."""
        self.at, self._hits = self._measure.hits_by_budget(self._least)

    def hits(self, budget: int) -> int:
        if self._short_by_one and budget < self.longest:
            room = budget - rooms_short_by_one(self._a, self._least, budget)
            return self._measure.hits(self._least <= room[self._a.request])
        n = int(np.searchsorted(self.at, budget, side="right"))
        return int(self._hits[n - 1]) if n else 0
