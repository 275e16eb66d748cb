"""`kvtape calibrate`: what each operation costs on this engine, model and machine, learnt from recorded times."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AsJson, PlotPath, log_place

if TYPE_CHECKING:
    from kvtape.cli.output import Section
    from kvtape.sim.costs.model import CostTable

__all__ = ["calibrate"]


def calibrate(
    logs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[LOG]...", help="Logs of one engine, model and setting.", parser=log_place),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="F.json", help="Write the cost model; an earlier one is replaced.")
    ] = None,
    roofline: Annotated[
        str | None,
        typer.Option(
            "--roofline",
            metavar="SPEC",
            help="Instead of logs, numbers: flops=,bytes_per_s=,params=,weight_bytes=,row_bytes=.",
        ),
    ] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", metavar="NAME", help="Name of the machine that recorded, kept with it.")
    ] = None,
    plot: PlotPath = None,
    as_json: AsJson = False,
) -> int:
    """Learn what operations cost from the times in logs.

    Each kind of operation is a sum of terms (calls, tokens, rows attended to, bytes) with rates of at least 0, fitted
    by non-negative least squares with a robust loss. Operations that the logs do not show are named.

    \b
    Example:
      kvtape calibrate demo-out/demo.duckdb --out costs.json
    """
    from collections import Counter
    from contextlib import ExitStack

    from kvtape.backends.errors import UsageError
    from kvtape.cli.files import write_whole
    from kvtape.cli.logs import opened
    from kvtape.cli.output import canonical_json, emit, kvtape_version, report_digest
    from kvtape.cli.plots.writing import check_plot, write_picture
    from kvtape.cli.progress import progress
    from kvtape.sim.costs.calibrate import calibrate as learn
    from kvtape.sim.costs.roofline import roofline_costs

    check_plot(plot)
    if bool(logs) == (roofline is not None):
        raise UsageError("give logs to calibrate on, or --roofline, not both")
    twice = sorted(str(path) for path, n in Counter(path.resolve() for path in logs or ()).items() if n > 1)
    if twice:
        raise UsageError(f"{twice[0]} is given twice; each log counts once")
    if roofline is not None:
        costs = roofline_costs(roofline, machine=machine, kvtape_version=kvtape_version())
    else:
        with ExitStack() as held:
            tapes = [held.enter_context(opened(path)) for path in logs or ()]
            with progress("calibrating") as shown:
                costs = learn(tapes, machine=machine, kvtape_version=kvtape_version(), progress=shown.update)
    if plot is not None:
        from kvtape.cli.plots.calibration import calibration_picture

        write_picture(plot, calibration_picture(costs))
    body = costs.to_json()
    if out is not None:
        write_whole(out, canonical_json(body) + "\n")
    said = {key: value for key, value in body.items() if key != "schema"}
    where = {"out": None if out is None else str(out)}
    emit("calibrate", said | where, _sections(costs), as_json=as_json, digest=report_digest(said))
    return 0


def _sections(costs: CostTable) -> list[Section]:
    from kvtape.cli.output import Section
    from kvtape.sim.costs.terms import TERMS

    origin = costs.origin
    whose = f"{origin.backend} {origin.model_name or ''}".rstrip()
    title = f"costs of {whose}" + (", HYPOTHETICAL: from numbers of hardware, no log" if origin.hypothetical else "")
    rates = [
        (kind, term.name, rate, term.unit)
        for kind, known in costs.kinds.items()
        for term, rate in zip(TERMS[kind], known.rates, strict=True)
        if rate
    ]
    sections = [Section(title, ("operation", "term", "rate", "unit"), rates)]
    held: list[tuple[Any, ...]] = [
        (
            kind,
            known.fit.events,
            known.fit.r2,
            f"{100 * known.fit.median_error:.1f} %",
            f"{100 * known.fit.p95_error:.1f} %",
            f"{known.fit.tokens[0]} to {known.fit.tokens[1]}",
            f"{known.fit.resident[0]} to {known.fit.resident[1]}",
        )
        for kind, known in costs.kinds.items()
        if known.fit is not None
    ]
    if held:
        columns = ("operation", "events", "R2", "median error", "p95 error", "tokens seen", "resident seen")
        sections.append(Section("how the rates hold on what they were learnt from", columns, held))
    by = [f"{kind} is priced as {other}" for kind, other in costs.stand_ins.items()]
    if by:
        sections.append(Section("not in the logs: " + ", ".join(by), (), ()))
    if costs.missing:
        sections.append(Section("no price for: " + ", ".join(costs.missing), (), ()))
    return sections
