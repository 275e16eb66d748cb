"""How near simulations come to what was recorded, for the panel of proofs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvtape.report.data.commands import COSTS_OF_OTHERS, repeated
from kvtape.report.figures.chart import Axis, Chart, Series, chart_figure
from kvtape.report.figures.parts import Parts
from kvtape.report.given.reading import Named
from kvtape.report.given.shapes import Fidelity, FidelityCase, Whatif
from kvtape.report.panel import Cell, Figure, Missing, Table
from kvtape.report.sources import Sources
from kvtape.sim.costs.model import CostTable

__all__ = ["fidelity_parts"]

_CASE_COLUMNS: Final = (
    *("engine", "log", "what", "n", "model, median error (%)", "model, p95 (%)", "machine, median (%)"),
    *("machine, p95 (%)", "verdict"),
)
_COLOURS: Final = 7
"""Series beside the line of equal times that have a colour of their own."""
_FIT_COLUMNS: Final = ("operation", "events", "R2", "median error (%)", "p95 error (%)", "tokens seen", "resident seen")


def fidelity_parts(sources: Sources) -> Parts:
    """Of cost models, what-ifs of the demo and fidelity.json that were given."""
    given = sources.given
    costs = given.of(CostTable)
    tables = [_recorded(given.of(Whatif)), *(_fits(named) for named in costs)]
    tables += [table for named in given.of(Fidelity) for table in _cases(named)]
    figures = tuple(f for n, named in enumerate(costs, 1) if (f := _scatter(named, f"fit-{n}")) is not None)
    shown = tuple(table for table in tables if table is not None)
    if shown:
        return Parts(figures, shown)
    whatif = repeated(sources.log.path.name, sources.sessions).get(COSTS_OF_OTHERS)
    what = "Nothing was given that says how near a simulation of this log comes to the recording."
    learnt = whatif is not None and "--roofline" not in whatif
    return Parts(missing=(Missing(what, whatif.splitlines()[0] if whatif and learnt else "make fidelity"),))


def _recorded(whatifs: Iterable[Named[Whatif]]) -> Table | None:
    rows: list[tuple[Cell, ...]] = [
        (
            named.name,
            recorded.residency_events,
            "the same tokens after every one" if recorded.equal else "NOT what the engine held",
            recorded.difference or "none",
        )
        for named in whatifs
        if (recorded := named.value.recorded) is not None
    ]
    columns = ("source", "events that change residency", "verdict", "first difference")
    return Table("The recorded policies, simulated, beside what the engine held", columns, rows) if rows else None


def _fits(named: Named[CostTable]) -> Table:
    table = named.value
    origin = table.origin
    rows: list[tuple[Cell, ...]] = [
        (
            *(kind, known.fit.events, known.fit.r2, 100 * known.fit.median_error, 100 * known.fit.p95_error),
            *(f"{known.fit.tokens[0]} to {known.fit.tokens[1]}", f"{known.fit.resident[0]} to {known.fit.resident[1]}"),
        )
        for kind, known in table.kinds.items()
        if known.fit is not None
    ]
    whose = f"{origin.backend} {origin.engine_version or ''}, {origin.model_name or 'unknown model'}"
    kind = "HYPOTHETICAL, from numbers of hardware" if origin.hypothetical else "on what they were learnt from"
    missing = f"; no price for {', '.join(table.missing)}" if table.missing else ""
    return Table(f"How the costs of {named.name} hold ({whose}) {kind}{missing}", _FIT_COLUMNS, rows)


def _scatter(named: Named[CostTable], name: str) -> Figure | None:
    """Recorded against modelled times of single events: up to 200 of each operation are kept in the file."""
    fits = {kind: known.fit for kind, known in named.value.kinds.items() if known.fit is not None}
    pairs = {kind: sorted((m / 1e6, r / 1e6) for m, r in fit.scatter if m > 0 and r > 0) for kind, fit in fits.items()}
    drawn = sorted((kind for kind in pairs if pairs[kind]), key=lambda kind: -sum(r for _, r in pairs[kind]))[:_COLOURS]
    if not drawn:
        return None
    series = [Series(k, [m for m, _ in pairs[k]], [r for _, r in pairs[k]], "points") for k in drawn]
    ends = [value for s in series for value in (*s.x, *s.y)]
    line = [min(ends), max(ends)]
    told = ", ".join(f"{kind} {100 * fits[kind].median_error:.1f} %" for kind in drawn)
    left = len(fits) - len(drawn)
    return chart_figure(
        name,
        f"Modelled and recorded times: {named.name}",
        f"One point an event, up to 200 of each operation, evenly taken; the {len(drawn)} operations that took longest "
        f"({left} more are in the table). Median relative errors: {told}.",
        Chart(
            Axis("modelled", "ms", log=True),
            Axis("recorded", "ms", log=True),
            (*series, Series("equal", line, line, "dashed")),
        ),
    )


def _cases(named: Named[Fidelity]) -> Iterable[Table]:
    rows = [
        row
        for engine, cases in named.value.engines.items()
        for log, case in cases.items()
        for row in _case(engine, log, case)
    ]
    clock = f"{named.value.clock} time"
    yield Table(
        f"{named.name}: simulations beside two recordings, and one recording beside the other; {clock}",
        _CASE_COLUMNS,
        rows,
    )


def _case(engine: str, log: str, case: FidelityCase) -> Iterable[tuple[Cell, ...]]:
    verdict = "holds" if case.holds else "does NOT hold"
    same = case.difference or f"the same tokens at all {case.residency_events} events"
    bar = f"{verdict}: turn error at most {100 * case.allowed:.1f} %; {same}"
    pairs = [
        *((op, pair, "") for op, pair in case.operation.items()),
        ("turn", case.turn, bar),
        ("total", case.total, ""),
    ]
    for what, pair, said in pairs:
        of = (pair.model, pair.machine)
        yield (
            engine,
            log,
            what,
            pair.machine.n,
            *(100 * v for s in of for v in (s.median, s.p95)),
            said or "told only",
        )
