"""Panel: how much of each turn was reused, and why the rest was computed."""

from __future__ import annotations

from collections.abc import Sequence

from kvtape.report.data.reuse import MEANING, Reason, Turn, grouped, reasons, turns
from kvtape.report.figures.chart import Axis, Chart, Series, chart_figure
from kvtape.report.figures.missing import nothing_to_show
from kvtape.report.figures.parts import scaled
from kvtape.report.figures.residency import thinning
from kvtape.report.panel import Figure, Missing, Panel, Table
from kvtape.report.sources import Sources

__all__ = ["reuse_panel"]

MOST_BARS = 240
"""More turns than that are summed up, some neighbours together."""

_LEAD = (
    "What each turn's prompt found in the cache: tokens reused, tokens that had been evicted and stayed forgotten, and "
    "tokens past the common prefix that had to be computed; with those put behind the prefix. Below, why the engine "
    "computed prompt tokens, summed over all sessions of the runs shown."
)


def reuse_panel(sources: Sources) -> Panel:
    title = "Reuse, and why prompts were computed"
    if nothing := nothing_to_show(sources):
        return Panel("reuse", title, _LEAD, missing=nothing)
    labels = {(v.row.run_id, v.row.session_id): v.label for v in sources.views}
    found = turns(sources.log, list(labels))
    why = reasons(sources.log, {(s.run_id, s.session_id) for s in sources.sessions})
    figures: list[Figure] = []
    missing: list[Missing] = []
    if found:
        figures.append(_turns_figure(found, labels))
    else:
        missing.append(Missing("No turn of these sessions says what it reused.", _RECORD))
    if why:
        figures.append(_why_figure(why))
        tables: tuple[Table, ...] = (_why_table(why),)
    else:
        missing.append(Missing("No computation of a prompt is recorded in these sessions.", _RECORD))
        tables = ()
    return Panel("reuse", title, f"{_LEAD} {thinning(sources)}".strip(), tuple(figures), tables, tuple(missing))


_RECORD = "kvtape record --chat FILE --log L"


def _turns_figure(found: Sequence[Turn], labels: dict[tuple[str, str], str]) -> Figure:
    bars = grouped(found, MOST_BARS)
    names = tuple(_name(labels[t.key], t, several=len(labels) > 1) for t in bars)
    x = list(range(len(bars)))
    parts = (
        ("reused", [t.reused for t in bars]),
        ("forgotten", [t.forgotten for t in bars]),
        ("prefilled", [t.prefilled for t in bars]),
        ("suffix", [t.suffix for t in bars]),
    )
    series = tuple(Series(name, x, y, "bars") for name, y in parts if name == "reused" or any(y))
    chart = Chart(
        Axis("session and turn" if len(labels) > 1 else "turn", names=names), Axis("prompt", "tokens"), series
    )
    prefix, reused = sum(t.prefix for t in found), sum(t.reused for t in found)
    share = f"{reused / prefix:.1%} of {prefix:,} prefix tokens were reused" if prefix else "no turn has a prefix"
    summed = "" if len(bars) == len(found) else f" Neighbouring turns are summed up into {len(bars)} bars."
    lost = sum(t.forgotten for t in found)
    summary = f"{len(found):,} turns: {share}, {lost:,} stayed forgotten.{summed}"
    return chart_figure("reuse-turns", "What turns found in the cache", summary, chart)


def _name(label: str, turn: Turn, *, several: bool) -> str:
    number = f"{turn.first}" if turn.first == turn.last else f"{turn.first}-{turn.last}"
    return f"{label} {number}" if several else number


def _why_figure(why: Sequence[Reason]) -> Figure:
    x = list(range(len(why)))
    texts = [MEANING.get(r.reason, "") for r in why]
    series = Series("computed", x, [r.tokens for r in why], "bars", texts=texts)
    chart = Chart(Axis("reason", names=tuple(r.reason for r in why)), Axis("computed", "tokens"), (series,))
    total = sum(r.tokens for r in why)
    most = why[0]
    share = f" ({most.tokens / total:.0%})" if total else ""
    summary = (
        f"The engine computed {total:,} prompt tokens in {sum(r.events for r in why):,} events; most of them, "
        f"{most.tokens:,}{share}, because {MEANING.get(most.reason, most.reason)}."
    )
    return chart_figure("reuse-why", "Why prompt tokens were computed", summary, chart)


def _why_table(why: Sequence[Reason]) -> Table:
    rows = [(r.reason, MEANING.get(r.reason, ""), r.events, r.tokens, scaled(r.elapsed_ns, 1e6)) for r in why]
    return Table("Why prompt tokens were computed", ("reason", "meaning", "events", "tokens", "time (ms)"), rows)
