"""`kvtape certify`: which storage types of the KV cache a model bears, on this engine and machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtape.cli.args import AnyModelPath, AsJson

__all__ = ["certify"]


def certify(
    backend: Annotated[
        str, typer.Option("--backend", metavar="SPEC", help="llama or openvino[:key=value,...].")
    ] = "llama",
    model: AnyModelPath = None,
    kv_type: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-type",
            metavar="K[/V]",
            help="Storage of keys and values, like q8_0 or q8_0/f16; repeatable. Default: all that the engine has.",
            show_default=False,
        ),
    ] = None,
    flash: Annotated[
        list[str] | None,
        typer.Option(
            "--flash",
            metavar="on|off|auto",
            help="Flash attention of llama; repeatable. Default: each of them.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option("--text", metavar="F", help="What is predicted; - for stdin. Default: the shipped essay."),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option("--log", metavar="OUT", help="Also write the rows into a new log.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Keep the rows in this document instead of the user's own.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A short look, printed and not kept: too little to advertise anything.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Measure also what has a row already, of yours or shipped with kvtape.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Measure what a KV storage type costs, and certify it when it passes.

    Quality against the best precision, predicted against stored bytes, round trips, drift under shifts. What a row of
    this model, engine version and class of machine says already is not measured again. Each row is kept as it is
    finished, and a run that was interrupted goes on behind it. Each type runs in a process of its own.
    Exits 1 when a type fails; one that the engine refuses is told and is no failure.

    \b
    Example:
      kvtape certify --backend llama --kv-type q8_0 --flash on
    """
    from kvtape.cli.certification import Asked, run_certify

    return run_certify(
        Asked(
            backend=backend,
            model=model,
            kv_types=tuple(kv_type or []),
            flash=tuple(flash or []),
            text=text,
            log=log,
            out=out,
            quick=quick,
            again=again,
            as_json=as_json,
        )
    )
