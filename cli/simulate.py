"""`kvtape simulate`: a log once more, under another policy or on another machine, in modelled time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AsJson, BlockTokens, LogOrTrace, TraceFormat
from kvtape.cli.simulation import (
    Affinity,
    ArrivalsOption,
    CostsPath,
    LinkBandwidth,
    LinkLatency,
    Memory,
    Pace,
    SlotDies,
    TrainedContext,
    figure_rows,
    machine,
    rule_sections,
    workload,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtape.cli.output import Section
    from kvtape.sim.costs.model import CostTable
    from kvtape.sim.world.running import Simulated
    from kvtape.sim.world.sampling import Sample
    from kvtape.sim.world.script import Script
    from kvtape.sim.world.settings import Settings

__all__ = ["simulate"]


def simulate(
    source: LogOrTrace,
    costs: CostsPath,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="SPEC", help="Another policy; default: the recorded one.")
    ] = None,
    n_ctx: Annotated[
        int | None, typer.Option("--n-ctx", metavar="N", min=2, help="Another context, tokens; default: as recorded.")
    ] = None,
    block: Annotated[int | None, typer.Option("--block", metavar="N", min=1, help="Tokens of a planner block.")] = None,
    cold_tokens: Annotated[
        int | None, typer.Option("--cold-tokens", metavar="N", min=0, help="Another cold-store budget, tokens.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option("--slots", metavar="N", min=0, help="Contexts in use at once; default: one each.")
    ] = None,
    memory: Memory = None,
    link: LinkBandwidth = None,
    link_latency: LinkLatency = 0.0,
    arrivals: ArrivalsOption = "open",
    pace: Pace = 1.0,
    affinity: Affinity = True,
    n_ctx_train: TrainedContext = None,
    slot_dies: SlotDies = None,
    out: Annotated[
        Path | None, typer.Option("--log", metavar="OUT", help="Write the simulated events to a new log.")
    ] = None,
    sample_sessions: Annotated[
        float | None,
        typer.Option(
            "--sample-sessions", metavar="SHARE", help="With --log: write only so many of all sessions, 0.01."
        ),
    ] = None,
    sample: Annotated[
        int | None, typer.Option("--sample", metavar="N", help="With --log: write only N sessions.")
    ] = None,
    sample_seed: Annotated[
        int | None, typer.Option("--sample-seed", metavar="S", help="Draws which ones; default: 0.")
    ] = None,
    format_name: TraceFormat = "auto",
    block_tokens: BlockTokens = None,
    as_json: AsJson = False,
) -> int:
    """Run a log's workload again in modelled time, decisions made anew.

    The same session and planner code as live; what operations cost comes from the cost model. Tokens are the log's:
    another policy changes what is resident and what it costs, not what the model said.

    \b
    Example:
      kvtape simulate demo-out/demo.duckdb --costs costs.json \\
        --policy stream:sink=4,recent=252 --n-ctx 512 --log simulated.duckdb
    """
    from kvtape.cli.output import emit, report_digest
    from kvtape.cli.progress import progress
    from kvtape.sim.costs.model import read_costs
    from kvtape.sim.world.running import simulate as run

    drawn = _sample(out, sample_sessions, sample, sample_seed)
    settings = machine(
        policy=policy,
        n_ctx=n_ctx,
        block=block,
        cold_tokens=cold_tokens,
        slots=slots,
        memory=memory,
        link=link,
        link_latency=link_latency,
        arrivals=arrivals,
        pace=pace,
        affinity=affinity,
        slot_dies=slot_dies,
    )
    table = read_costs(costs)
    scripts, workload_digest, trained = workload(source, n_ctx_train, format_name, block_tokens)
    with progress("simulating") as shown:
        if out is None:
            found = run(scripts, settings, table, n_ctx_train=trained, progress=shown.update)
            digest = None
        else:
            found, digest = _recorded(out, scripts, settings, table, trained, workload_digest, drawn)
    body = _body(found, settings, table, workload_digest) | {"run_digest": digest}
    # What came of it is the same wherever it is written to.
    where = {"log": None if out is None else str(out)}
    emit("simulate", body | where, _sections(found), as_json=as_json, digest=report_digest(body))
    return 0


def _sample(out: Path | None, share: float | None, count: int | None, seed: int | None) -> Sample | None:
    from kvtape.backends.errors import UsageError
    from kvtape.sim.world.sampling import Sample

    if share is None and count is None:
        if seed is not None:
            raise UsageError("--sample-seed draws nothing by itself; give --sample or --sample-sessions")
        return None
    if out is None:
        raise UsageError("--sample-sessions and --sample say which events are written; give --log too")
    return Sample(share, count, seed or 0)


def _recorded(
    out: Path,
    scripts: Sequence[Script],
    settings: Settings,
    costs: CostTable,
    trained: int | None,
    source: str,
    sample: Sample | None,
) -> tuple[Simulated, str]:
    """As `simulate`, with the events of all or of a sample in a new log, sealed at the end. Its logical digest too."""
    from dataclasses import asdict

    from kvtape.backends.modelled.clock import VirtualTimeline
    from kvtape.cli.logs import opened
    from kvtape.cli.output import report_digest
    from kvtape.cli.recording import new_log, recording, run_row
    from kvtape.sim.world.running import check_world
    from kvtape.sim.world.running import simulate as run
    from kvtape.traces.database import wal_path
    from kvtape.traces.sidecar import head_path

    check_world(scripts, settings, costs, n_ctx_train=trained)
    place = new_log(out)
    config = {
        "verb": "simulate",
        "settings": settings.as_dict(),
        "rules": settings.rules(),
        "parent_digest": source,
        "costs_digest": report_digest(costs.to_json()),
        "n_ctx_train": trained,
        "sample": None if sample is None else asdict(sample),
    }
    row = run_row("simulation", config, {"modelled": "1"}, 0)
    mine = False
    try:
        with recording(place, row, VirtualTimeline()) as recorder:
            mine = True
            found = run(
                scripts, settings, costs, run_id=row.run_id, sinks=[recorder], sample=sample, n_ctx_train=trained
            )
    except BaseException:
        # Half a recording is a record of what happened; half a simulation is nothing. Another's log stays.
        for left in (place, head_path(place), wal_path(place)) if mine else ():
            left.unlink(missing_ok=True)
        raise
    with opened(place) as tape:
        return found, tape.logical_digest(row.run_id)


def _body(found: Simulated, settings: Settings, costs: CostTable, source: str) -> dict[str, Any]:
    from dataclasses import asdict

    from kvtape.cli.output import report_digest

    config = {"settings": settings.as_dict(), "costs": report_digest(costs.to_json())}
    turns = [
        asdict(t) | {"queued_ns": t.queued_ns, "ttft_ns": t.ttft_ns, "latency_ns": t.latency_ns} for t in found.turns
    ]
    return {
        "figures": found.figures,
        "turns": turns,
        "rules": found.rules,
        "assumed": list(found.assumed),
        "settings": settings.as_dict(),
        "source_digest": source,
        "costs_digest": config["costs"],
        "config_digest": report_digest(config),
        "seed": None,
    }


def _sections(found: Simulated) -> list[Section]:
    from kvtape.cli.output import Section

    sections = [Section("simulated", ("what", "value"), figure_rows(found.figures))]
    refused: dict[str, int] = {}
    for turn in found.turns:
        if turn.why is not None:
            refused[turn.why] = refused.get(turn.why, 0) + 1
    if refused:
        sections.append(Section("what was not served, and why", ("turns", "why"), [(n, w) for w, n in refused.items()]))
    return sections + rule_sections(found.rules.items(), found.assumed)
