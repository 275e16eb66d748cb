"""What policies did to answers, as evaluations measured it, for the panel of policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtape.report.data.trials import Quality, given_qualities, qualities_of
from kvtape.report.figures.chart import Axis, Chart, Series, chart_figure
from kvtape.report.figures.parts import Parts
from kvtape.report.panel import Cell, Figure, Missing, Table
from kvtape.report.sources import Sources

__all__ = ["quality_parts"]

_COLUMNS = (
    *("source", "task", "engine", "policy", "budget (tokens)", "region", "n", "tokens"),
    *("recall", "recall, low", "recall, high", "NLL (nats/token)", "KL (nats/token)"),
)


def quality_parts(sources: Sources) -> Parts:
    """Trials of the log and evaluations that were given. Raises LogUnreadable."""
    found = (*qualities_of(sources.log, [run.run_id for run in sources.runs]), *given_qualities(sources.given))
    if not found:
        command = "kvtape eval --task needle --backend llama:scores=on --policy stream --budget 128 --json > eval.json"
        what = "Nothing was measured of what policies do to answers; costs alone do not show it."
        return Parts(missing=(Missing(what, command),))
    table = Table(
        "Evaluations: recall with its 95 % Wilson interval, likelihoods as means over tokens",
        _COLUMNS,
        [_row(q) for q in found],
    )
    return Parts(tuple(_recall(found)), (table,))


def _row(q: Quality) -> tuple[Cell, ...]:
    asked = (q.source, q.task, q.backend, q.policy, q.budget, q.region or "none", q.n, q.n_tokens)
    return (*asked, q.recall, q.low, q.high, q.nll, q.kl)


def _recall(found: Sequence[Quality]) -> Iterable[Figure]:
    asked = [q for q in found if q.recall is not None and q.low is not None and q.high is not None]
    places = dict.fromkeys((q.source, q.backend, q.region) for q in asked)
    for number, (source, backend, region) in enumerate(places, 1):
        of = [q for q in asked if (q.source, q.backend, q.region) == (source, backend, region)]
        names = tuple(dict.fromkeys(f"{q.policy}, {q.budget:,}" if q.budget else q.policy for q in of))
        series = Series(
            f"{backend}, {region or 'no region'}",
            list(range(len(of))),
            [q.recall or 0.0 for q in of],
            "points",
            low=[q.low or 0.0 for q in of],
            high=[q.high or 0.0 for q in of],
            texts=[f"{q.policy}, {q.n} trials" for q in of],
        )
        best = max(of, key=lambda q: q.recall or 0.0)
        if len(names) != len(of):
            names = tuple(f"{q.policy}, {i + 1}" for i, q in enumerate(of))
        yield chart_figure(
            f"recall-{number}",
            f"Recall of a planted fact: {source}, {backend}, {region or 'no region'}",
            f"Share of right answers of {of[0].n} trials each, with the 95 % Wilson interval. Best: {best.policy} with "
            f"{best.recall:.2f}.",
            Chart(Axis("policy, budget", names=names), Axis("recall", "share"), (series,)),
        )
