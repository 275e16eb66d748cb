"""Panel of proofs: which precisions and optimisations were certified, what was refused, how near simulations come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvtape.eval.certification.report import COLUMNS as CERTIFIED_COLUMNS
from kvtape.eval.certification.report import cells
from kvtape.eval.gate.report import COLUMNS as GATE_COLUMNS
from kvtape.eval.gate.report import cells_of, percent
from kvtape.report.data.proofs import Precision, Proof, precisions, proofs_of, refusals
from kvtape.report.figures.fidelity import fidelity_parts
from kvtape.report.given.reading import Named
from kvtape.report.given.shapes import Gate, GateRow
from kvtape.report.panel import Cell, Missing, Panel, Table
from kvtape.report.sources import Sources

__all__ = ["proofs_panel"]

_LEAD: Final = (
    "What was measured before a storage type or an optimisation was let through, on which engine and class of machine, "
    "and how near the simulator comes to the recording. A row speaks of its model, engine version and machine alone. "
    "Likelihoods are in nats a token against the best precision; nothing is aggregated."
)


def proofs_panel(sources: Sources) -> Panel:
    """Certifications, the gate, fidelity. Raises UsageError for a damaged document of proofs, LogUnreadable."""
    found = proofs_of(sources.log, sources.sessions, [run.run_id for run in sources.runs], sources.given)
    tables = [_precisions(sources)] if sources.sessions else []
    missing: list[Missing] = []
    certified = [p for p in found if p.row.kind == "certification"]
    gated = [p for p in found if p.row.kind == "gate"]
    measured = [_given_gate(named) for named in sources.given.of(Gate)]
    tables += [*_certified(certified), *_gated(gated), *measured]
    if not certified:
        what = "No precision of these models was certified on these engines."
        missing.append(Missing(what, "kvtape certify --backend llama --json > certify.json"))
    if not gated and not measured:
        missing.append(
            Missing("No optimisation was put to the gate here.", "kvtape gate --backend llama --cell lookup")
        )
    fidelity = fidelity_parts(sources)
    return Panel(
        "proofs",
        "Certification and fidelity",
        _LEAD,
        fidelity.figures,
        (*tables, *fidelity.tables),
        (*missing, *fidelity.missing),
    )


def _precisions(sources: Sources) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            *(p.engine, p.engine_version, p.model, p.keys, p.values),
            *(p.knob or _base(p), _let_through(p), p.sessions),
        )
        for p in precisions(sources.log, sources.sessions)
    ]
    columns = ("engine", "version", "model", "keys", "values", "knob", "let through by a row", "sessions")
    return Table("How the sessions shown stored their rows", columns, rows)


def _base(p: Precision) -> str | None:
    """Of what stores no rows (an imported trace, a simulation) nothing is said."""
    return None if p.keys is None else "base: needs no proof"


def _let_through(p: Precision) -> str | None:
    if p.certified is None:
        return None if p.keys is None else "not needed"
    return "yes" if p.certified else "NO: opened uncertified"


def _certified(proofs: Sequence[Proof]) -> Iterable[Table]:
    places = _places(proofs)
    for where, of in places.items():
        measured = [cells(p.row)[:-1] for p in of if len(p.row.measures) > 1]
        days = " and ".join(sorted({p.row.day for p in of}))
        if measured:
            yield Table(f"Certified {where}, {days}", CERTIFIED_COLUMNS[:-1], [tuple(_told(row)) for row in measured])
    for where, of in places.items():
        refused = [(r.subject, r.what, r.why) for r in refusals(of)]
        if refused:
            yield Table(f"Did not pass or was refused {where}", ("knob", "what", "why"), refused)


def _told(values: Iterable[Cell]) -> Iterable[Cell]:
    """What a row has no figure for was not measured, which is another thing than not to know it."""
    return ("not measured" if value is None else value for value in values)


def _places(proofs: Iterable[Proof]) -> dict[str, list[Proof]]:
    """By where they were measured and where the rows are from, in words."""
    of: dict[str, list[Proof]] = {}
    for proof in proofs:
        row = proof.row
        where = f"on {row.engine}, {row.engine_version}: {row.model}, on {row.machine} ({proof.where})"
        of.setdefault(where, []).append(proof)
    return of


def _gated(proofs: Sequence[Proof]) -> Iterable[Table]:
    for where, of in _places(proofs).items():
        rows = [tuple(_told(line)) for line in cells_of(p.row for p in of)]
        days = " and ".join(sorted({p.row.day for p in of}))
        title = f"The gate {where}, {days}: time saved with its 95 % interval; * is the clock that decided"
        yield Table(title, GATE_COLUMNS, rows)


def _given_gate(named: Named[Gate]) -> Table:
    said = named.value
    rows: list[tuple[Cell, ...]] = [
        (r.optimisation, r.workload, r.model, _saved(r, "cpu"), _saved(r, "wall"), r.verdict, r.reason or "none given")
        for r in said.rows
    ]
    title = (
        f"The gate on {said.engine}, {said.engine_version}, on {said.machine} ({named.name}): time saved with its 95 % "
        f"interval, which must be at least {100 * said.margin:g} %; * is the clock that decided"
    )
    columns = ("optimisation", "workload", "model", "CPU time saved", "wall time saved", "verdict", "why")
    return Table(title, columns, rows)


def _saved(row: GateRow, clock: str) -> str:
    effect = row.cpu if clock == "cpu" else row.wall
    return "not measured" if effect is None else percent(dict(effect)) + ("*" if row.decided_by == clock else "")
