"""`kvtape whatif`: policies times budgets on the workload of a log or a trace, and which of them nothing beats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AsJson, BlockTokens, LogOrTrace, PlotPath, TraceFormat
from kvtape.cli.simulation import (
    Affinity,
    ArrivalsOption,
    CostsPath,
    LinkBandwidth,
    LinkLatency,
    Memory,
    Pace,
    RayAddress,
    Seed,
    Seeds,
    SlotDies,
    TrainedContext,
    Workers,
    draws_of,
    executor_of,
    machine,
    rule_sections,
    workload,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtape.cli.output import Section
    from kvtape.sim.costs.model import CostTable
    from kvtape.sim.whatif.grid import Point
    from kvtape.sim.whatif.rows import Draws
    from kvtape.sim.whatif.sweep import Swept
    from kvtape.sim.world.settings import Settings

__all__ = ["whatif", "whatif_body", "whatif_sections"]


def whatif(
    source: LogOrTrace,
    costs: CostsPath,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="SPEC", help="Repeatable. One without a budget gets each --budget."),
    ] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option("--budget", metavar="N", min=2, help="Context of a session, tokens; repeatable."),
    ] = None,
    slots: Annotated[
        list[int] | None, typer.Option("--slots", metavar="N", min=0, help="Contexts in use at once; repeatable.")
    ] = None,
    cold_tokens: Annotated[
        list[int] | None, typer.Option("--cold-tokens", metavar="N", min=0, help="Cold-store budget; repeatable.")
    ] = None,
    block: Annotated[
        list[int] | None, typer.Option("--block", metavar="N", min=1, help="Tokens of a planner block; repeatable.")
    ] = None,
    grid: Annotated[
        Path | None, typer.Option("--grid", metavar="F.json", help="These lists in a file instead, by name.")
    ] = None,
    memory: Memory = None,
    link: LinkBandwidth = None,
    link_latency: LinkLatency = 0.0,
    arrivals: ArrivalsOption = "closed",
    pace: Pace = 1.0,
    affinity: Affinity = True,
    n_ctx_train: TrainedContext = None,
    slot_dies: SlotDies = None,
    seeds: Seeds = None,
    seed: Seed = None,
    workers: Workers = None,
    ray: RayAddress = None,
    format_name: TraceFormat = "auto",
    block_tokens: BlockTokens = None,
    plot: PlotPath = None,
    as_json: AsJson = False,
) -> int:
    """Simulate every combination and mark the Pareto front.

    Compared are time to first token, time per output token, KV bytes, recomputed tokens and, on a log recorded with
    --score-all, the attention mass that a policy retains, among the points that serve most turns. What it forgets is in
    the rows (forgotten, evicted); what that does to answers is not: see kvtape eval.

    \b
    Examples:
      kvtape whatif demo-out/demo.duckdb --costs costs.json \\
        --policy none --policy stream --policy class --budget 512 --budget 1024
      kvtape whatif conversation_trace.jsonl --costs costs.json --policy stream --budget 4096
    """
    from kvtape.backends.errors import UsageError
    from kvtape.cli.output import emit
    from kvtape.cli.plots.writing import check_plot, write_picture
    from kvtape.cli.progress import progress
    from kvtape.sim.costs.model import read_costs
    from kvtape.sim.whatif.grid import Grid, points_of, read_grid
    from kvtape.sim.whatif.sweep import sweep

    check_plot(plot)
    given = Grid({}, seeds, seed) if grid is None else read_grid(grid)
    flags = {"policy": policy, "budget": budget, "slots": slots, "cold_tokens": cold_tokens, "block": block}
    if grid is not None and (any(flags.values()) or seeds is not None or seed is not None):
        raise UsageError(
            "--grid has these itself; leave out --policy, --budget, --slots, --cold-tokens, --block, --seeds and --seed"
        )
    draws = draws_of(given.seeds, given.seed)
    base = machine(
        memory=memory,
        link=link,
        link_latency=link_latency,
        arrivals=arrivals,
        pace=pace,
        affinity=affinity,
        slot_dies=slot_dies,
    )
    axes = given.axes if grid is not None else {name: values or [] for name, values in flags.items()}
    points = points_of(axes, base)
    table = read_costs(costs)
    scripts, workload_digest, trained = workload(source, n_ctx_train, format_name, block_tokens)
    executor = executor_of(workers, ray)
    with progress("simulating") as shown:
        found = sweep(
            scripts, table, points, n_ctx_train=trained, draws=draws, executor=executor, progress=shown.update
        )
    body = whatif_body(found, points, base, table, workload_digest, draws)
    if plot is not None:
        from kvtape.cli.plots.tradeoffs import tradeoff_picture

        write_picture(plot, tradeoff_picture(body))
    emit("whatif", body, whatif_sections(body), as_json=as_json)
    return 0


def whatif_body(
    found: Swept, points: Sequence[Point], base: Settings, costs: CostTable, source: str, draws: Draws
) -> dict[str, Any]:
    """What `--json` prints."""
    from kvtape.cli.output import report_digest
    from kvtape.sim.whatif.pareto import compared
    from kvtape.sim.whatif.rows import draw_rules

    costs_digest = report_digest(costs.to_json())
    drawn = {"seeds": draws.count, "seed": None if draws.count == 1 else draws.seed}
    config = {"points": [p.settings.as_dict() for p in points], "costs": costs_digest, **drawn}
    rules = {k: v for k, v in base.rules().items() if k != "slots"} | draw_rules(base, draws)
    return {
        "rows": found.rows,
        "objectives": compared(found.rows),
        "rules": rules,
        "assumed": found.assumed,
        "hypothetical": costs.origin.hypothetical,
        "source_digest": source,
        "costs_digest": costs_digest,
        "config_digest": report_digest(config),
        **drawn,
    }


def whatif_sections(body: dict[str, Any]) -> list[Section]:
    """The table, the front first to last as the points were given, then rules and what had to be assumed."""
    from kvtape.cli.output import Section

    varied = [name for name in ("slots", "cold_tokens", "block") if len({row[name] for row in body["rows"]}) > 1]
    columns = ("", "policy", "budget", *(name.replace("_", " ") for name in varied))
    drawn = body["seeds"] > 1
    columns += ("not served", "TTFT p50 s", "p95 s", "TPOT p50 ms", "p95 ms")
    columns += ("TTFT p95, 95 %", "TPOT p95, 95 %") if drawn else ()
    columns += ("peak KV MiB", "evicted", "recomputed", "forgotten")
    attended = any(row["retained_mass"] is not None for row in body["rows"])
    columns += ("retained mass", "worst turn", "opt") if attended else ()
    columns += ("front share",) if drawn else ()
    rows, errors = [], []
    for row in body["rows"]:
        key = ("*" if row["pareto"] else "", row["policy"], row["budget"], *(row[name] for name in varied))
        if row["error"] is not None:
            errors.append((row["policy"], row["budget"], row["error"]))
            continue
        times = [_scaled(row[f"ttft_{p}_ns"], 9) for p in ("p50", "p95")]
        times += [_scaled(row[f"tpot_{p}_ns"], 6) for p in ("p50", "p95")]
        paid = (
            row["peak_kv_bytes"] / 2**20,
            *(row[f"{what}_tokens"] for what in ("evicted", "recomputed", "forgotten")),
        )
        mass = (row["retained_mass"], row["retained_mass_worst"], row["opt_retained_mass"]) if attended else ()
        spread = [_between(row, f"{kind}_p95_ns", power) for kind, power in (("ttft", 9), ("tpot", 6))] if drawn else []
        shares = (row["pareto_share"],) if drawn else ()
        rows.append((*key, row["not_served"], *times, *spread, *paid, *mass, *shares))
    sections = [Section("what if (* serves most turns, and nothing that does beats it in everything)", columns, rows)]
    if errors:
        sections.append(Section("cannot be", ("policy", "budget", "why"), errors))
    return sections + rule_sections(body["rules"].items(), body["assumed"])


def _scaled(ns: int | None, power: int) -> float | None:
    return None if ns is None else ns / 10**power


def _between(row: dict[str, Any], name: str, power: int) -> str | None:
    """The interval of a figure as text."""
    found = row["intervals"][name]
    return None if found is None else f"{found['low'] / 10**power:.3g}..{found['high'] / 10**power:.3g}"
