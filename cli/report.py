"""`kvtape report`: one page of a log that needs no network, for people who want to look before they read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtape.cli.args import AsJson, LogPath

__all__ = ["report"]


def report(
    log: LogPath,
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs to show; default: the last recording.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="F.html", help="The page to write.")] = Path("report.html"),
    session: Annotated[
        list[str] | None, typer.Option("--session", metavar="S", help="Only this session; repeatable.")
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            "--with",
            metavar="F.json|DIR",
            help="Results of replay, whatif, curve and others (--json), or a folder of them; repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a log as one HTML page: residency map, time line, occupancy, reuse, policies, proofs.

    The page is one file that loads nothing; a report made again has the same bytes.

    \b
    Example:
      kvtape report demo-out/demo.duckdb --with demo-out --out report.html
    """
    from kvtape.backends.errors import UsageError
    from kvtape.cli.logs import opened
    from kvtape.cli.output import Section, emit, note
    from kvtape.report.write import write_report

    if str(out) == "-":
        raise UsageError("--out -: a report is written to a file; name one, like report.html, or /dev/stdout")
    with opened(log) as tape:
        written = write_report(tape, out, runs=runs or (), sessions=session or (), results=results or ())
    for text in written.left_out:
        note(f"kvtape: not in the report: {text}")
    body = {"out": str(written.path), "bytes": written.size, "sessions": written.sessions}
    line = f"{written.path}: {written.size / 2**20:.2f} MiB; open it in any browser, it needs no network"
    emit("report", body, [Section(line, (), ())], as_json=as_json, digest=written.digest)
