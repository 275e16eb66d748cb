"""Panel of policies: what others would have cost on this workload, what they would have kept, and the bounds."""

from __future__ import annotations

from typing import Final

from kvtape.report.data.commands import COSTS_OF_OTHERS, RECORD, repeated
from kvtape.report.data.policies import comparisons
from kvtape.report.figures.comparison import comparison_figures
from kvtape.report.figures.hit_rates import hit_rate_parts
from kvtape.report.figures.policy_tables import policy_tables
from kvtape.report.figures.quality import quality_parts
from kvtape.report.figures.runs import run_parts
from kvtape.report.panel import Figure as Drawing
from kvtape.report.panel import Missing, Panel, Table
from kvtape.report.sources import Sources

__all__ = ["policies_panel"]

_LEAD: Final = (
    "What other policies and budgets would have cost on the same workload, in modelled time, and how much of it any "
    "policy could save. Tokens are the log's own: another policy changes what is resident and what it costs, not what "
    "the model said. Nothing is aggregated here: a point is one simulated policy on one machine, its interval the "
    "middle 95 % of the draws of the arrivals."
)


def policies_panel(sources: Sources) -> Panel:
    """What-ifs, searches, runs of the log beside each other, hit rates, evaluations. Raises LogUnreadable."""
    found = comparisons(sources.given)
    figures: list[Drawing] = []
    tables: list[Table] = []
    missing: list[Missing] = []
    for number, comparison in enumerate(found, 1):
        figures += comparison_figures(comparison, f"policies-{number}")
        tables += policy_tables(comparison)
    if not found:
        missing.append(_no_simulation(sources))
    for part in (run_parts(sources), hit_rate_parts(sources), quality_parts(sources)):
        figures += part.figures
        tables += part.tables
        missing += part.missing
    return Panel("policies", "Policy comparison", _LEAD, tuple(figures), tuple(tables), tuple(missing))


def _no_simulation(sources: Sources) -> Missing:
    command = repeated(sources.log.path.name, sources.sessions).get(COSTS_OF_OTHERS)
    if command is None:
        return Missing("No simulation of other policies: the runs that are shown have no session to simulate.", RECORD)
    why = "No simulation of other policies was given. This makes one, and --with whatif.json shows it."
    if "--roofline" in command:
        why += " The log has no times of an engine: put in the numbers of your machine and model."
    return Missing(why, command)
