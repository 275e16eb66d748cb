"""`kvtape eval`: does a policy keep what matters? Recall of a planted fact, likelihood of a long text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtape.cli.args import AnyModelPath, AsJson, Chunk, Threads
from kvtape.cli.precision import Flash, KvType, Uncertified

if TYPE_CHECKING:
    from kvtape.cli.evaluation import Asked

__all__ = ["evaluate"]


def evaluate(
    task: Annotated[str, typer.Option("--task", metavar="T", help="needle, nll or batching.")] = "needle",
    model: AnyModelPath = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="SPEC",
            help="llama, openvino or reference[:key=value,...]; repeatable. Scored policies need scores=on. Default: "
            "llama:scores=on; batching: openvino:scores=on.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="SPEC",
            help="A policy, repeatable; dense (none) is always there. One without a budget gets each --budget; "
            "random without a seed draws with each trial's.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option("--budget", metavar="N", min=2, help="Tokens a policy may keep; repeatable.", show_default=False),
    ] = None,
    seeds: Annotated[str, typer.Option("--seeds", metavar="A:B", help="Seeds of the prompts, half open.")] = "0:20",
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="N",
            min=16,
            help="Length of the text. Default: 1000; nll: 8 x n_ctx; batching: 512.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--text", metavar="F", help="Of nll and batching: a text file, - for stdin. Default: generated sentences."
        ),
    ] = None,
    format_name: Annotated[
        str | None,
        typer.Option("--format", metavar="F", help="Of the needle: city (default) or passkey.", show_default=False),
    ] = None,
    needle_at: Annotated[
        list[str] | None,
        typer.Option(
            "--needle-at", metavar="R", help="sink, middle (default) or recent; repeatable.", show_default=False
        ),
    ] = None,
    n_ctx: Annotated[
        int | None,
        typer.Option(
            "--n-ctx", metavar="N", min=2, help="Context. Default: what is needed; nll: 256.", show_default=False
        ),
    ] = None,
    kv_type: KvType = None,
    flash: Flash = None,
    uncertified: Uncertified = False,
    threads: Threads = 1,
    chunk: Chunk = 512,
    choose_layers: Annotated[
        bool, typer.Option("--choose-layers", help="Only print which layers find the fact best, on --seeds.")
    ] = False,
    layer_seeds: Annotated[
        str | None,
        typer.Option(
            "--layer-seeds",
            metavar="A:B",
            help="Choose on these seeds, apart from --seeds, the layers of policies with layers=chosen.",
            show_default=False,
        ),
    ] = None,
    comparator: Annotated[
        list[str] | None,
        typer.Option(
            "--comparator",
            metavar="SPEC",
            help="Of batching: continuous-batching[:start=..,recent=..,most=..,aggregation=..,window=..,crush=..], "
            "repeatable.",
            show_default=False,
        ),
    ] = None,
    budget_blocks: Annotated[
        list[int] | None,
        typer.Option(
            "--budget-blocks",
            metavar="N",
            min=1,
            help="Of batching: blocks of 32 tokens that are kept where a spec has no most; repeatable. Default: 8.",
            show_default=False,
        ),
    ] = None,
    new_tokens: Annotated[
        int | None,
        typer.Option(
            "--new-tokens",
            metavar="N",
            min=2,
            help="Of batching: tokens behind each prompt. Default: 64.",
            show_default=False,
        ),
    ] = None,
    continued: Annotated[
        str,
        typer.Option(
            "--continue",
            metavar="W",
            help="Of batching: with the prompt's own text, or with what is likeliest (greedy).",
        ),
    ] = "text",
    prove_options: Annotated[
        bool,
        typer.Option(
            "--prove-options", help="Of batching: only say which of its sparse options compute what they say."
        ),
    ] = False,
    log: Annotated[
        Path | None,
        typer.Option("--log", metavar="OUT", help="Record every trial in a new log.", show_default=False),
    ] = None,
    content: Annotated[bool, typer.Option("--content", help="Store token ids in the log.")] = False,
    timings: Annotated[bool, typer.Option("--timings", help="Seconds a trial, on stderr.")] = False,
    as_json: AsJson = False,
) -> int:
    """Run policies on the same prompts from the same cache, and say what each of them cost.

    Recall comes with its 95 % interval. Two runs print the same bytes.

    \b
    Example:
      kvtape eval --task needle --backend llama:scores=on --seeds 0:40 \\
        --policy stream --policy snapkv:sink=4,recent=32,queries=probe \\
        --budget 128 --budget 256
    """
    from kvtape.cli.evaluation import Asked

    return _runner(task, choose_layers=choose_layers)(
        Asked(
            task=task,
            model=model,
            backends=tuple(backend or ["openvino:scores=on" if task == "batching" else "llama:scores=on"]),
            policies=tuple(policy or []),
            budgets=tuple(budget or []),
            seeds=seeds,
            layer_seeds=layer_seeds,
            choose_layers=choose_layers,
            tokens=tokens,
            text=text,
            format_name=format_name,
            where=tuple(needle_at or []),
            n_ctx=n_ctx,
            kv_type=kv_type,
            flash=flash,
            uncertified=uncertified,
            threads=threads,
            chunk=chunk,
            log=log,
            content=content,
            timings=timings,
            as_json=as_json,
            comparators=tuple(comparator or []),
            budget_blocks=tuple(budget_blocks or []),
            new_tokens=new_tokens,
            continued=continued,
            prove_options=prove_options,
        )
    )


def _runner(task: str, *, choose_layers: bool) -> Callable[[Asked], int]:
    """What runs a task. Only that of batching is imported with OpenVINO, which the others do without."""
    from kvtape.planner.grammar import choose_name

    if choose_name("task", task, ("needle", "nll", "batching")) == "batching":
        from kvtape.cli.eval_batching import run_batching

        return run_batching
    if task == "nll":
        from kvtape.cli.eval_nll import run_nlls

        return run_nlls
    from kvtape.cli.eval_needle import run_layers, run_needles

    return run_layers if choose_layers else run_needles
