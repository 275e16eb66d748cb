"""`kvtape tune`: the cheapest policy, budget and machine that meet conditions, on a log's own workload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

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
    RayAddress,
    Seed,
    Seeds,
    SlotDies,
    TrainedContext,
    Workers,
    executor_of,
    machine,
    workload,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtape.sim.whatif.search import Wish
    from kvtape.sim.world.script import Script

__all__ = ["tune"]

_POLICIES: Final = ("none", "stream", "class", "h2o", "snapkv", "tova")
_SERVED: Final = ("not_served", "served", "unserved", "refused", "cut_short")


def tune(
    source: LogOrTrace,
    costs: CostsPath,
    minimize: Annotated[
        str | None, typer.Option("--minimize", metavar="FIGURE", help="What to make least; default: ttft_p95.")
    ] = None,
    maximize: Annotated[
        str | None, typer.Option("--maximize", metavar="FIGURE", help="What to make most, in place of --minimize.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="CONDITION", help="FIGURE<=BOUND or FIGURE>=BOUND; repeatable, all must hold."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", metavar="SPEC", help="Repeatable; options it leaves open are searched. Default: most."
        ),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", metavar="N|LOW:HIGH", help="Contexts of a session, tokens; repeatable."),
    ] = None,
    slots: Annotated[
        list[int] | None, typer.Option("--slots", metavar="N", min=1, help="Contexts in use at once; repeatable.")
    ] = None,
    cold_tokens: Annotated[
        list[int] | None, typer.Option("--cold-tokens", metavar="N", min=0, help="Cold-store budget; repeatable.")
    ] = None,
    trials: Annotated[int, typer.Option("--trials", metavar="N", min=1, help="Points to simulate.")] = 64,
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
    as_json: AsJson = False,
) -> int:
    """Search for the cheapest point that meets every condition.

    Figures are those of kvtape whatif; times need a unit, sizes may have one. Every turn must be served, unless a
    condition speaks of that. Exit code 1: nothing that was tried meets the conditions; the nearest point is shown.

    \b
    Example:
      kvtape tune demo-out/demo.duckdb --costs costs.json --budget 256:2048 \\
        --minimize ttft_p95 --where 'forgotten<=200' --where 'peak_kv_bytes<=40MiB'
    """
    from kvtape.cli.output import emit
    from kvtape.cli.progress import progress
    from kvtape.cli.tune_report import tune_body, tune_sections
    from kvtape.sim.costs.model import read_costs
    from kvtape.sim.whatif.point import Workload, run_task
    from kvtape.sim.whatif.rows import Draws
    from kvtape.sim.whatif.search import search
    from kvtape.sim.whatif.space import Space
    from kvtape.sim.whatif.sweep import without_choice
    from kvtape.sim.world.shapes import check_costs

    wish = _wish(minimize, maximize, where or [])
    base = machine(
        memory=memory,
        link=link,
        link_latency=link_latency,
        arrivals=arrivals,
        pace=pace,
        affinity=affinity,
        slot_dies=slot_dies,
    )
    draws = Draws(seeds or 1, seed or 0)
    executor = executor_of(workers, ray)
    table = read_costs(costs)
    scripts, workload_digest, trained = workload(source, n_ctx_train, format_name, block_tokens)
    for script in scripts:
        check_costs(table, script.row)
    lists = {"budget": _budgets(budget, scripts), "slots": _once(slots), "cold_tokens": _once(cold_tokens)}
    asking = tuple(script for script in scripts if script.turns)
    given = dict.fromkeys(policy or [text for text in _POLICIES if Space((text,), lists, base, asking).answers(text)])
    space = Space(tuple(given), lists, base, asking)
    with (
        progress("tuning") as shown,
        executor.open(run_task, Workload(scripts, table, trained, draws.seed)) as run,
    ):
        found = search(run, space, wish, trials=trials, seed=draws.seed, draws=draws, progress=shown.update)
    flags = _flags(memory, link, link_latency, arrivals, pace, n_ctx_train, slot_dies or (), affinity=affinity)
    simulate = ["kvtape", "simulate", source, "--costs", str(costs), *flags]
    body = tune_body(found, wish, space, simulate, table, workload_digest, draws)
    body["assumed"] += without_choice(scripts, base.arrivals, draws)
    emit("tune", body, tune_sections(body), as_json=as_json)
    return 0 if found.best is not None else 1


def _wish(minimize: str | None, maximize: str | None, where: Sequence[str]) -> Wish:
    from kvtape.backends.errors import UsageError
    from kvtape.sim.whatif.conditions import ALL_SERVED, parse_condition, parse_goal
    from kvtape.sim.whatif.search import Wish

    if minimize is not None and maximize is not None:
        raise UsageError("--minimize and --maximize: give one of them")
    goal = parse_goal(minimize or "ttft_p95", "less") if maximize is None else parse_goal(maximize, "more")
    conditions = tuple(parse_condition(text) for text in where)
    if not any(c.name in _SERVED for c in conditions):
        conditions = (ALL_SERVED, *conditions)
    return Wish(goal, conditions)


def _budgets(given: Sequence[str] | None, scripts: Sequence[Script]) -> list[int]:
    """Those given, else from a sixteenth of the recorded context up to it. Raises SimulationError."""
    from kvtape.sim.errors import SimulationError
    from kvtape.sim.whatif.space import budgets_between

    if not given:
        contexts = [s.row.n_ctx for s in scripts if s.row.n_ctx is not None]
        if not contexts:
            raise SimulationError("the log names no context; give --budget N or LOW:HIGH")
        return budgets_between(max(2, min(contexts) // 16), max(contexts))
    found: set[int] = set()
    for text in given:
        low, colon, high = text.partition(":")
        if not low.isdecimal() or not (high.isdecimal() if colon else True):
            raise SimulationError(f"--budget {text}: write a number of tokens, or LOW:HIGH")
        found |= set(budgets_between(int(low), int(high if colon else low)))
    return sorted(found)


def _once(values: Sequence[int] | None) -> list[int]:
    return sorted(set(values or ()))


def _flags(
    memory: str | None,
    link: str | None,
    link_latency: float,
    arrivals: str,
    pace: float,
    n_ctx_train: int | None,
    slot_dies: Sequence[str],
    *,
    affinity: bool,
) -> list[str]:
    """The machine as `kvtape simulate` takes it."""
    said = [] if memory is None else ["--memory", memory]
    said += [] if link is None else ["--link", link]
    said += [] if not link_latency else ["--link-latency", repr(link_latency)]
    said += ["--arrivals", arrivals]
    said += [] if pace == 1 else ["--pace", repr(pace)]
    said += [] if affinity else ["--no-affinity"]
    said += [word for text in slot_dies for word in ("--slot-dies", text)]
    return said + ([] if n_ctx_train is None else ["--n-ctx-train", str(n_ctx_train)])
