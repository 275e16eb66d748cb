"""`kvtape curve`: hit rate against budget, for the prefix blocks of a log or of somebody's trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvtape.cli.args import AsJson, BlockTokens, LogOrTrace, PlotPath, TraceFormat

if TYPE_CHECKING:
    from kvtape.cli.output import Section
    from kvtape.sim.blocks.block_trace import BlockTrace
    from kvtape.sim.blocks.sweep import Curve, Point

__all__ = ["curve", "curve_body", "curve_sections"]

_MOST_ROWS = 100
"""A curve of all budgets has thousands of rows: people see the default budgets, JSON has them all."""


def curve(
    source: LogOrTrace,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="NAME", help="fifo, lru, opt, ... or module:Class; repeatable."),
    ] = None,
    budget_blocks: Annotated[
        str | None,
        typer.Option(
            "--budget-blocks",
            metavar="N,N,...",
            help="Budgets in blocks, or all (lru and opt); default: powers of two.",
        ),
    ] = None,
    rules: Annotated[
        str, typer.Option("--rules", metavar="NAME", help="kvtape, kvcache-simulator or libcachesim.")
    ] = "kvtape",
    weighting: Annotated[
        str | None, typer.Option("--weighting", metavar="W", help="A hit counts its tokens, or 1: token, block.")
    ] = None,
    prefix: Annotated[
        str | None, typer.Option("--prefix", metavar="P", help="Hits before the first miss, or all: longest, any.")
    ] = None,
    warmup: Annotated[
        float | None, typer.Option("--warmup", metavar="SHARE", help="First requests that are not measured, 0 to <1.")
    ] = None,
    in_flight: Annotated[
        str | None,
        typer.Option("--in-flight", metavar="R", help="Whole requests, or block by block: held, none."),
    ] = None,
    format_name: TraceFormat = "auto",
    block_tokens: BlockTokens = None,
    plot: PlotPath = None,
    as_json: AsJson = False,
) -> None:
    """Hit rate against budget: which policy keeps the blocks that prompts share.

    Prompts are lists of blocks; a budget is how many blocks the cache of all sessions holds. Default policies: fifo,
    lru, and the bound: opt, which knows the future. The rules stand in the report.

    \b
    Example:
      kvtape curve conversation_trace.jsonl --policy lru --policy opt --budget-blocks 1024,4096,16384
    """
    from kvtape.cli.output import emit
    from kvtape.cli.plots.writing import check_plot, write_picture
    from kvtape.cli.progress import progress
    from kvtape.sim.blocks.policies.registry import choose_policy
    from kvtape.sim.blocks.rules import rules_named
    from kvtape.sim.blocks.sweep import sweep

    check_plot(plot)
    chosen = rules_named(rules).varied(weighting=weighting, prefix=prefix, warmup=warmup, in_flight=in_flight)
    policies = [choose_policy(text) for text in dict.fromkeys(policy or ["fifo", "lru", "opt"])]
    budgets = _budgets(budget_blocks)
    trace = _trace(source, format_name, block_tokens)
    with progress("curve") as bar:
        found = sweep(trace, chosen, policies, budgets, progress=bar.update)
    if plot is not None:
        from kvtape.cli.plots.curves import curve_picture

        write_picture(plot, curve_picture(found, trace.block_tokens))
    body = curve_body(trace, found, [choice.name for choice in policies], budgets)
    emit("curve", body, curve_sections(trace, found), as_json=as_json)


def _budgets(text: str | None) -> list[int] | Literal["all"] | None:
    from kvtape.sim.blocks.errors import CurveError

    if text is None:
        return None
    if text == "all":
        return "all"
    parts = [part.strip() for part in text.split(",")]
    wrong = next((p for p in parts if not (p.isascii() and p.isdigit() and len(p) < 16 and int(p))), None)
    if wrong is not None:
        raise CurveError(f"--budget-blocks {text}: {wrong!r} is no number of blocks; write them as 1024,4096")
    return [int(part) for part in parts]


def _trace(source: str, format_name: str, block_tokens: int | None) -> BlockTrace:
    from kvtape.cli.block_source import is_log, noted, require_log_alone

    if is_log(source):
        from kvtape.cli.args import log_place
        from kvtape.cli.logs import opened
        from kvtape.sim.blocks.from_log import read_log

        require_log_alone(source, format_name, block_tokens)
        with opened(log_place(source)) as log:
            return read_log(log)
    from kvtape.sim.blocks.from_file import read_trace_file
    from kvtape.traces.importers.protocol import Asked

    with noted() as notes:
        return read_trace_file(source, format_name=format_name, asked=Asked(block_tokens), notes=notes)


def curve_body(trace: BlockTrace, found: Curve, policies: list[str], budgets: list[int] | str | None) -> dict[str, Any]:
    """What `--json` prints."""
    from dataclasses import asdict

    from kvtape.cli.output import report_digest

    rules = found.rules.as_dict()
    config = {"rules": rules, "policies": policies, "budget_blocks": budgets, "block_tokens": trace.block_tokens}
    return {
        "rules": rules,
        "rows": [asdict(point) for point in found.points],
        "ceiling": found.ceiling,
        "omitted_budgets": found.omitted,
        "measured": found.total,
        "measured_requests": found.measured_requests,
        "requests": trace.n_requests,
        "requests_without_blocks": trace.without_blocks,
        "accesses": trace.n_accesses,
        "distinct_blocks": found.n_blocks,
        "block_tokens": trace.block_tokens,
        "config_digest": report_digest(config),
        "source_digest": trace.digest,
        "seed": None,
    }


def curve_sections(trace: BlockTrace, found: Curve) -> list[Section]:
    """The table of rates, then the rules."""
    from kvtape.cli.output import Section
    from kvtape.sim.blocks.sweep import default_budgets

    names = list(dict.fromkeys(point.policy for point in found.points))
    curves = {name: [p for p in found.points if p.policy == name] for name in names}
    budgets = sorted({p.budget_blocks for p in found.points})
    if len(budgets) > _MOST_ROWS:
        budgets = default_budgets(found.n_blocks)
    rows = [(b, b * trace.block_tokens, *(_percent(_rate_at(curves[name], b)) for name in names)) for b in budgets]
    title = f"hit rate of {trace.n_requests} requests, {found.n_blocks} distinct blocks of {trace.block_tokens} tokens"
    about: list[tuple[str, Any]] = [(key, value) for key, value in found.rules.as_dict().items()]
    about += [("ceiling", _percent(found.ceiling)), ("measured requests", found.measured_requests)]
    if found.omitted:
        about.append(("budgets left out", f"{', '.join(map(str, found.omitted))}: not full when measuring begins"))
    if trace.without_blocks:
        about.append(("requests without blocks", f"{trace.without_blocks}, left out"))
    return [Section(title, ("blocks", "tokens", *names), rows), Section("rules", ("rule", "value"), about)]


def _rate_at(curve: list[Point], budget: int) -> float:
    """Of the largest budget there is that is not above `budget`; 0 where there is none."""
    from bisect import bisect_right

    at = bisect_right(curve, budget, key=lambda point: point.budget_blocks)
    return curve[at - 1].hit_rate if at else 0.0


def _percent(rate: float) -> str:
    return f"{100 * rate:.2f} %"
