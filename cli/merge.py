"""`kvtape merge`: several logs, or the segments of a log folder, in one new log or as Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtape.cli.args import AsJson, NewLog

__all__ = ["merge"]


def merge(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG...", help="Log files and log folders.", show_default=False)
    ],
    out: NewLog,
    parquet: Annotated[
        bool, typer.Option("--parquet", help="Write a folder of Parquet files, by day and session, instead.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Put several logs into one sealed log that verifies.

    Segments that are being recorded are taken as they are at this moment. The parts are not touched.

    \b
    Example:
      kvtape merge logs/ --out week.duckdb
    """
    from kvtape.cli.output import Section, emit
    from kvtape.cli.progress import progress
    from kvtape.traces.merge import merge as run
    from kvtape.traces.merge import merge_to_parquet

    with progress("merging") as shown:
        report = (merge_to_parquet if parquet else run)(logs, out, shown.update)
    sources = [{"log": name, "digest": digest} for name, digest in report.sources]
    body = {
        "out": str(out),
        "events": report.events,
        "sessions": report.sessions,
        "batches": report.batches,
        "rows": report.rows,
        "sources": sources,
    }
    title = f"{out}: {report.events} events of {report.sessions} sessions"
    sections = [Section(title, ("log", "chain digest"), [tuple(s.values()) for s in sources])]
    emit("merge", body, sections, as_json=as_json, digest=report.digest, digest_kind="chain")
    return 0
