"""Hit rates against budgets, for the panel of policies."""

from __future__ import annotations

import shlex

from kvtape.report.data.commands import RECORD
from kvtape.report.data.hit_rates import BOUND, HitRates, NoHitRates, given_hit_rates, hit_rates_of
from kvtape.report.figures.chart import Axis, Chart, Series, chart_figure
from kvtape.report.figures.parts import Parts
from kvtape.report.panel import Cell, Figure, Missing, Table
from kvtape.report.sources import Sources

__all__ = ["hit_rate_parts"]


def hit_rate_parts(sources: Sources) -> Parts:
    """Those that were given; without any, those of each run shown. Raises LogUnreadable."""
    found: list[tuple[str, HitRates | NoHitRates]] = [(str(r.source), r) for r in given_hit_rates(sources.given)]
    if not found:
        found = [(f"run {run.run_id}", hit_rates_of(sources.log, run.run_id)) for run in sources.shown]
    figures: list[Figure] = []
    tables: list[Table] = []
    missing: list[Missing] = []
    for number, (of, rates) in enumerate(found, 1):
        if isinstance(rates, NoHitRates):
            curve = f"kvtape curve {shlex.quote(sources.log.path.name)} --json > curve.json"
            missing.append(Missing(f"No hit rates of {of}: {rates.why}.", curve if rates.too_many else RECORD))
            continue
        figures.append(_figure(rates, f"hit-rates-{number}", of))
        tables.append(_rules(rates, of))
    return Parts(tuple(figures), tuple(tables), tuple(missing))


def _figure(rates: HitRates, name: str, of: str) -> Figure:
    series = tuple(
        Series(c.policy, c.budgets, [100 * r for r in c.hit_rates], "dashed" if c.policy == BOUND else "line")
        for c in rates.curves
    )
    most = max(rates.curves, key=lambda c: c.of_budgets)
    thinned = len(most.budgets) < most.of_budgets
    some = f" Drawn are {len(most.budgets):,} of {most.of_budgets:,} budgets." if thinned else ""
    weighting = f"{rates.rules.get('weighting', 'unknown')}s"
    return chart_figure(
        name,
        f"Hit rate against budget: {of}",
        f"Share of the {rates.measured:,} {weighting} of {rates.measured_requests:,} measured prompts "
        f"({rates.requests:,} in all) that an earlier prompt had brought and the cache still held, by the number of "
        f"blocks of {rates.block_tokens} tokens that it holds for all sessions together. A cache without end comes to "
        f"{100 * rates.ceiling:.2f} %; {BOUND} knows the future.{some}",
        Chart(Axis("budget", "blocks", log=True), Axis("hit rate", "%"), series),
    )


def _rules(rates: HitRates, of: str) -> Table:
    rows: list[tuple[Cell, ...]] = [(name.replace("_", " "), _told(value)) for name, value in rates.rules.items()]
    rows += [("distinct blocks", f"{rates.distinct_blocks:,} of {rates.block_tokens} tokens")]
    rows += [(f"more hits than {BOUND}, which these rules allow", text) for text in rates.above_bound]
    return Table(f"Hit rates of {of}: rules", ("rule", "value"), rows)


def _told(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
