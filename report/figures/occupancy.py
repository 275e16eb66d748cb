"""Panel: how many tokens the cache held, beside what it might hold."""

from __future__ import annotations

from kvtape.report.data.views import Limits, SessionView
from kvtape.report.figures.missing import nothing_to_show
from kvtape.report.figures.residency import thinning
from kvtape.report.panel import Cell, Figure, Panel, Table
from kvtape.report.sources import Sources

__all__ = ["occupancy_panel"]

_LEAD = (
    "Tokens resident in the engine's cache after every event, and tokens in the cold store, from the fold of the log. "
    "Where events share a pixel the line is their mean and the area around it reaches from the lowest to the highest. "
    "Dashed: the effective context, and the budget that the plans worked to."
)


def occupancy_panel(sources: Sources) -> Panel:
    title = "Occupancy against budget"
    if nothing := nothing_to_show(sources):
        return Panel("occupancy", title, _LEAD, missing=nothing)
    summaries = [_summary(view) for view in sources.views]
    data = {"summaries": summaries}
    figure = Figure("occupancy-curve", "Tokens in the cache", "occupancy", summaries[0], data, _table(sources))
    return Panel("occupancy", title, f"{_LEAD} {thinning(sources)}".strip(), figures=(figure,))


def _summary(view: SessionView) -> str:
    peak, limits = view.history.fullest, view.limits
    of = "" if not limits.context else f", {peak / limits.context:.0%} of the context of {limits.context:,}"
    return f"Session {view.label}: at most {peak:,} tokens resident{of}. {_budgets(limits)}."


def _budgets(limits: Limits) -> str:
    if not limits.plans:
        return (
            "No plan was made"
            if limits.policy_budget is None
            else f"The policy's budget is {limits.policy_budget:,} tokens"
        )
    budgets = sorted({tokens for _, tokens in limits.plans})
    if len(budgets) == 1:
        return f"The plans worked to a budget of {budgets[0]:,} tokens"
    return f"The plans worked to budgets of {budgets[0]:,} to {budgets[-1]:,} tokens"


def _table(sources: Sources) -> Table:
    columns = (
        "session",
        "context (tokens)",
        "largest plan budget (tokens)",
        "most resident (tokens)",
        "mean resident (tokens)",
        "resident at the end (tokens)",
        "most cold (tokens)",
    )
    return Table("Occupancy in numbers; the mean is over events", columns, [_row(view) for view in sources.views])


def _row(view: SessionView) -> tuple[Cell, ...]:
    past, limits = view.history, view.limits
    return (
        view.label,
        limits.context,
        max((tokens for _, tokens in limits.plans), default=limits.policy_budget),
        past.fullest,
        float(past.resident.mean()) if len(past) else None,
        past.final.resident_tokens,
        int(past.cold.max(initial=0)),
    )
