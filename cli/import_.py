"""`kvtape import`: other people's traces and server logs into a log of kvtape's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AsJson, BlockTokens

if TYPE_CHECKING:
    from kvtape.traces.importers.importing import ImportResult

__all__ = ["import_trace"]


def import_trace(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="Files of one format, plain or gzipped; - reads stdin.", show_default=False
        ),
    ],
    log: Annotated[Path, typer.Option("--log", metavar="L", help="The log to write; must not exist yet.")],
    format_name: Annotated[
        str, typer.Option("--format", metavar="NAME", help="auto, or a name of docs/importing.md.")
    ] = "auto",
    block_tokens: BlockTokens = None,
    content: Annotated[
        bool, typer.Option("--content", help="Store token ids that the source has (default: keyed hashes only).")
    ] = False,
    drop_duplicates: Annotated[
        bool, typer.Option("--drop-duplicates", help="Leave out rows that were there before, byte for byte.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Import a request trace, an engine's KV events or a server's log.

    Everything is checked before the log is written: a bad line leaves no log behind. What the source does not say is
    NULL in the log.

    \b
    Example:
      kvtape import conversation_trace.jsonl --log mooncake.duckdb
    """
    from kvtape.cli.logs import opened
    from kvtape.cli.output import emit, kvtape_version, note
    from kvtape.cli.recording import require_new
    from kvtape.traces.importers import importing
    from kvtape.traces.importers.protocol import Asked

    require_new(log)
    asked = Asked(block_tokens, drop_duplicates)
    result = importing.import_trace(
        files, log, kvtape_version=kvtape_version(), format_name=format_name, asked=asked, content=content
    )
    for warned in result.warnings:
        where = warned.file if warned.line is None else f"{warned.file}, line {warned.line}"
        more = f" (and {warned.count - 1} more)" if warned.count > 1 else ""
        note(f"kvtape: {where}{more}: {warned.text}")
    body = _body(log, result)
    rows = [(key, value) for key, value in body.items() if key != "warnings"]
    with opened(log) as tape:
        digest = tape.logical_digest()
    emit("import", body, [_section(log, rows)], as_json=as_json, digest=digest, digest_kind="logical")


def _section(log: Path, rows: list[tuple[str, Any]]) -> Any:
    from kvtape.cli.output import Section

    return Section(f"imported {log}", ("what", "value"), rows)


def _body(log: Path, result: ImportResult) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "log": str(log),
        "format": result.format,
        "rows": result.rows,
        "sessions": result.sessions,
        "events": result.events,
        "duplicates": result.duplicates,
        "folded": result.folded,
        "span_s": result.span_ns / 1e9,
        "warnings": [asdict(w) for w in result.warnings],
    }
