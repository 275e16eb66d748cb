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
    log: Annotated[
        Path, typer.Option("--log", metavar="L", help="A new log; or a log folder that is there, for a segment in it.")
    ],
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
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Follow one server's log as it grows, through rotations, till Ctrl-C."),
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait", metavar="S", min=0.0, help="With --follow: seconds for the file to come; default: for ever."
        ),
    ] = None,
    until_quiet: Annotated[
        float | None,
        typer.Option("--until-quiet", metavar="S", min=0.0, help="With --follow: end after S seconds without news."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import a request trace, an engine's KV events or a server's log.

    Everything is checked before the log is written: a bad line leaves no log behind. What the source does not say is
    NULL in the log.

    With --follow the log is written while the source grows, and can be read meanwhile. Ctrl-C and SIGTERM seal it.
    After a crash the same command goes on where it stopped; in a log folder each start has a segment.

    \b
    Examples:
      kvtape import conversation_trace.jsonl --log mooncake.duckdb
      kvtape import --follow server.log --format llama-server --log tapes
    """
    from kvtape.backends.errors import UsageError
    from kvtape.cli.output import kvtape_version
    from kvtape.cli.progress import progress
    from kvtape.cli.recording import require_new
    from kvtape.traces.importers import importing
    from kvtape.traces.importers.protocol import Asked

    if follow:
        _follow(files, log, format_name, block_tokens, drop_duplicates, content, wait, until_quiet, as_json=as_json)
        return
    if wait is not None or until_quiet is not None:
        raise UsageError("--wait and --until-quiet go with --follow")
    require_new(log)
    asked = Asked(block_tokens, drop_duplicates)
    with progress("importing") as shown:
        result = importing.import_trace(
            files,
            log,
            kvtape_version=kvtape_version(),
            format_name=format_name,
            asked=asked,
            content=content,
            tell=shown.update,
        )
    _tell(log, result, _body(log, result), as_json=as_json)


def _follow(
    files: list[str],
    log: Path,
    format_name: str,
    block_tokens: int | None,
    drop_duplicates: bool,
    content: bool,
    wait: float | None,
    until_quiet: float | None,
    *,
    as_json: bool,
) -> None:
    from kvtape.backends.errors import UsageError
    from kvtape.cli.following import follow
    from kvtape.cli.recording import require_folder

    if len(files) != 1:
        raise UsageError(f"--follow takes one file, not {len(files)}; follow each into a log of its own")
    if block_tokens is not None or drop_duplicates:
        raise UsageError("--block-tokens and --drop-duplicates are for files that can be looked at whole")
    require_folder(log)
    found = follow(files[0], log, format_name, content=content, wait_s=wait, quiet_s=until_quiet)
    body = _body(found.log or log, found.result) | {"resent_events": found.resent, "sealed": found.log is not None}
    _tell(found.log, found.result, body, as_json=as_json)


def _tell(log: Path | None, result: ImportResult, body: dict[str, Any], *, as_json: bool) -> None:
    """The warnings, then the summary, with the log's digest where there is a log."""
    from kvtape.cli.logs import opened
    from kvtape.cli.output import Section, emit, note

    for warned in result.warnings:
        where = warned.file if warned.line is None else f"{warned.file}, line {warned.line}"
        more = f" (and {warned.count - 1} more)" if warned.count > 1 else ""
        note(f"kvtape: {where}{more}: {warned.text}")
    rows = [(key, value) for key, value in body.items() if key != "warnings"]
    if log is None:
        emit("import", body, [Section("nothing came: no log was made", ("what", "value"), rows)], as_json=as_json)
        return
    with opened(log) as tape:
        digest = tape.logical_digest()
    section = Section(f"imported {log}", ("what", "value"), rows)
    emit("import", body, [section], as_json=as_json, digest=digest, digest_kind="logical")


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
