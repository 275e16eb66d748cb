"""Hit rates against budgets: from results of `kvtape curve`, else computed here from the prompts of a run.

Computed are first in first out, least recently used, and the bound that knows the future, at powers of two, under the
rules named `kvtape`: what `kvtape curve LOG` prints. A trace of more than `MOST_ACCESSES` is left to that command.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvtape.planner.blocks import DEFAULT_BLOCK
from kvtape.report.given.reading import Given
from kvtape.report.given.shapes import Curve
from kvtape.sim.blocks.errors import CurveError
from kvtape.sim.blocks.from_log import read_log
from kvtape.sim.blocks.policies.registry import choose_policy
from kvtape.sim.blocks.rules import rules_named
from kvtape.sim.blocks.sweep import Point, sweep
from kvtape.traces.reader import Log
from kvtape.traces.schema import quoted_text

__all__ = [
    "BOUND",
    "MOST_ACCESSES",
    "MOST_BUDGETS",
    "HitRates",
    "NoHitRates",
    "PolicyCurve",
    "given_hit_rates",
    "hit_rates_of",
]

BOUND: Final = "opt"
MOST_ACCESSES: Final = 300_000
MOST_BUDGETS: Final = 200
"""Of a policy with more, so many are kept: the least, the most, and between them ever fewer, as a logarithm goes."""
_COMPUTED: Final = ("fifo", "lru", BOUND)


@dataclass(frozen=True, slots=True)
class PolicyCurve:
    """One policy: `hit_rates` (shares) at `budgets` (blocks, ascending), which are some of `of_budgets`."""

    policy: str
    budgets: tuple[int, ...]
    hit_rates: tuple[float, ...]
    of_budgets: int


@dataclass(frozen=True, slots=True)
class HitRates:
    """`source`: the file, None where computed here. `ceiling`: the rate of a cache without end. Sizes in tokens.

    `measured`: tokens or blocks (the weighting of `rules`) that were asked for by `measured_requests`.
    """

    source: str | None
    curves: tuple[PolicyCurve, ...]
    ceiling: float
    rules: Mapping[str, Any]
    requests: int
    measured_requests: int
    measured: int
    distinct_blocks: int
    block_tokens: int

    @property
    def above_bound(self) -> tuple[str, ...]:
        """Policies with more hits than `opt` at a budget: a bound on blocks is none on tokens, nor after a warm-up."""
        bound = next((c for c in self.curves if c.policy == BOUND), None)
        if bound is None:
            return ()
        most = dict(zip(bound.budgets, bound.hit_rates, strict=True))
        return tuple(
            f"{curve.policy} at {budget} blocks: {rate:.4f}, opt {most[budget]:.4f}"
            for curve in self.curves
            for budget, rate in zip(curve.budgets, curve.hit_rates, strict=True)
            if budget in most and rate > most[budget]
        )


@dataclass(frozen=True, slots=True)
class NoHitRates:
    """Why there are none. `too_many`: the prompts are there, and `kvtape curve` computes with any number."""

    why: str
    too_many: bool = False


def given_hit_rates(given: Given) -> tuple[HitRates, ...]:
    """One for each result of `kvtape curve`."""
    return tuple(_given(named.name, named.value) for named in given.of(Curve))


def hit_rates_of(log: Log, run_id: str) -> HitRates | NoHitRates:
    """Those of a run's own prompts. Raises LogUnreadable."""
    asked = _asked(log, run_id)
    if asked > MOST_ACCESSES:
        return NoHitRates(
            f"its prompts ask for about {asked:,} blocks, more than a report computes with", too_many=True
        )
    try:
        trace = read_log(log, run_id)
        found = sweep(trace, rules_named("kvtape"), [choose_policy(name) for name in _COMPUTED])
    except CurveError as err:
        return NoHitRates(str(err).replace(str(log.path), log.path.name))  # the page does not say where it was made
    return HitRates(
        source=None,
        curves=_curves(found.points),
        ceiling=found.ceiling,
        rules=found.rules.as_dict(),
        requests=trace.n_requests,
        measured_requests=found.measured_requests,
        measured=found.total,
        distinct_blocks=found.n_blocks,
        block_tokens=trace.block_tokens,
    )


def _asked(log: Log, run_id: str) -> int:
    """Blocks that the prompts of a run ask for, counted before any is read; prompts behind others count whole."""
    run = f"run_id = {quoted_text(run_id)}"
    sizes = f"coalesce((SELECT min(block_tokens) FROM tokens WHERE {run}), {DEFAULT_BLOCK})"
    tokens = "n_tokens + CASE WHEN reason = 'suffix' THEN start ELSE 0 END"
    query = f"SELECT coalesce(sum(ceil(({tokens}) / {sizes})), 0)::BIGINT FROM events WHERE {run} AND op = 'prompt'"
    return int(log.sql(query)[1][0][0])


def _given(name: str, said: Curve) -> HitRates:
    return HitRates(
        source=name,
        curves=_curves(said.rows),
        ceiling=said.ceiling,
        rules=said.rules,
        requests=said.requests,
        measured_requests=said.measured_requests,
        measured=said.measured,
        distinct_blocks=said.distinct_blocks,
        block_tokens=said.block_tokens,
    )


def _curves(rows: Iterable[Point]) -> tuple[PolicyCurve, ...]:
    of: dict[str, dict[int, float]] = {}
    for row in rows:
        of.setdefault(row.policy, {})[row.budget_blocks] = row.hit_rate
    return tuple(_curve(policy, rates) for policy, rates in of.items())


def _curve(policy: str, rates: Mapping[int, float]) -> PolicyCurve:
    budgets = sorted(rates)
    if len(budgets) > MOST_BUDGETS:
        places = np.unique(np.geomspace(1, len(budgets), MOST_BUDGETS).round().astype(int)) - 1
        budgets = [budgets[i] for i in places.tolist()]
    return PolicyCurve(policy, tuple(budgets), tuple(rates[b] for b in budgets), len(rates))
