"""`kvtape export`: a log in the formats of others."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from kvtape.cli.args import AsJson, LogPath

__all__ = ["export"]


def export(
    log: LogPath,
    format_name: Annotated[
        str,
        typer.Option(
            "--format", metavar="NAME", help="parquet, jsonl, mooncake, bailian, perfetto, otlp or oraclegeneral."
        ),
    ],
    out: Annotated[str, typer.Option("--out", metavar="NEW", help="The file or folder to write; - for stdout.")],
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="R",
            help="Of this run; default: the log's own, for otlp all that were live or imported; not of parquet, jsonl.",
        ),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option(
            "--begin",
            metavar="TIME",
            help="otlp: when the first event was, ISO 8601; UTC without a zone.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a log in another format; the log is only read.

    parquet and jsonl hold every row, and jsonl imports back to the same log. The others hold what they can say.

    \b
    Example:
      kvtape export demo-out/demo.duckdb --format perfetto --out demo.json
    """
    from kvtape.backends.errors import UsageError
    from kvtape.cli.logs import opened
    from kvtape.cli.output import Section, emit
    from kvtape.cli.progress import progress
    from kvtape.traces.exporters.exporting import export_log

    if out == "-" and (as_json or format_name == "parquet"):
        raise UsageError("stdout holds one thing: give --out a name" + (" and leave --json" if as_json else ""))
    moment = None if begin is None else _since_1970(begin)
    with opened(log) as tape:
        digest = tape.chain_digest
        with progress("exporting") as shown:
            place = out if out == "-" else Path(out)
            result = export_log(tape, format_name, place, run, moment, shown.update)
    if out == "-":
        return
    body = {"log": str(log), "format": result.format, "out": out, "rows": result.rows}
    emit(
        "export",
        body,
        [Section(f"{out}: {result.rows} rows as {result.format}", (), ())],
        as_json=as_json,
        digest=digest,
        digest_kind="chain",
    )


def _since_1970(text: str) -> int:
    """Nanoseconds; a moment without a zone is UTC. Raises UsageError for what is no moment."""
    from kvtape.backends.errors import UsageError

    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--begin {text!r} is no time; write it like 2026-11-30T10:00:00Z") from None
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return (aware - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000
