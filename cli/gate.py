"""`kvtape gate`: may an optimisation be switched on for this model, engine and machine?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtape.cli.args import AnyModelPath, AsJson, BackendSpec, Chunk, Threads
from kvtape.cli.precision import Flash, KvType, Uncertified

__all__ = ["gate"]


def gate(
    cell: Annotated[
        list[str] | None,
        typer.Option(
            "--cell",
            metavar="O",
            help="deferred-prefill, lookup[:ngram=3,tokens=8] or draft:NAME[,tokens=4]; repeatable. Default: "
            "deferred-prefill and lookup, where the engine opens them.",
            show_default=False,
        ),
    ] = None,
    model: AnyModelPath = None,
    backend: BackendSpec = "llama",
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            metavar="W",
            help="chat, steps or rewrite; repeatable. Default: chat, without --chat.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        str | None, typer.Option("--chat", metavar="F", help="A chat of your own, as record --chat takes it.")
    ] = None,
    decode: Annotated[int, typer.Option("--decode", metavar="N", min=1, help="Of --chat: tokens of an answer.")] = 32,
    turns: Annotated[
        int, typer.Option("--turns", metavar="N", min=1, help="Timed turns of each arm, at least 4 conversations.")
    ] = 32,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of conversations and of the order.")] = 0,
    margin: Annotated[
        float,
        typer.Option("--margin", metavar="X", min=0, max=0.99, help="Share of the turn time to be saved at least."),
    ] = 0.05,
    threads: Threads = 1,
    chunk: Chunk = 512,
    kv_type: KvType = None,
    flash: Flash = None,
    uncertified: Uncertified = False,
    log: Annotated[
        Path | None,
        typer.Option("--log", metavar="OUT", help="Record every session, and the rows, in a new log."),
    ] = None,
    content: Annotated[bool, typer.Option("--content", help="Store token ids in the log.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Keep the rows in this document instead of the user's own."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Time turns with and without an optimisation, and let it through where it is materially better.

    The same conversations go through a plain and an optimised session, turn by turn in balanced random order. Let
    through is what generates the same tokens, computes the same within the floor, and saves the margin in the whole
    95 % interval. The row that is kept speaks of this model, engine version, class of machine and number of threads
    alone. Exits 1 when an optimised session says or computes something else.

    \b
    Example:
      kvtape gate --backend llama --cell lookup --flash on --workload rewrite
    """
    from kvtape.cli.gating import Asked, run_gate
    from kvtape.eval.gate.run import Effort

    return run_gate(
        Asked(
            backend=backend,
            model=model,
            cells=tuple(cell or ()),
            workloads=tuple(workload or ([] if chat is not None else ["chat"])),
            chat=chat,
            decode=decode,
            effort=Effort(turns=turns, seed=seed, margin=margin),
            threads=threads,
            chunk=chunk,
            kv_type=kv_type,
            flash=flash,
            uncertified=uncertified,
            log=log,
            content=content,
            out=out,
            as_json=as_json,
        )
    )
