"""`kvtape sql`: any question, read-only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AsJson, LogPath

if TYPE_CHECKING:
    from kvtape.traces.reader import Log

__all__ = ["sql"]


def sql(
    log: LogPath,
    query: Annotated[str, typer.Argument(metavar="SELECT", help="The query; - reads it from stdin.")],
    as_json: AsJson = False,
) -> None:
    """Ask the log a question; it is opened read-only.

    \b
    Example:
      kvtape sql demo-out/demo.duckdb "SELECT * FROM why_prefilled LIMIT 5"
    """
    import sys

    from kvtape.backends.errors import UsageError
    from kvtape.cli.logs import opened
    from kvtape.cli.output import Section, emit

    text = sys.stdin.read() if query == "-" else query
    with opened(log) as tape:
        columns, rows = _ask(tape, text)
        twice = sorted({name for name in columns if columns.count(name) > 1})
        if as_json and twice:
            raise UsageError(f"--json names values by their columns, and {', '.join(twice)} is there twice; use AS")
        body = {"columns": list(columns), "rows": [_record(columns, row) for row in rows]}
        section = Section(None, tuple(columns), rows)
        emit("sql", body, [section], as_json=as_json, digest=tape.chain_digest, digest_kind="chain")


def _ask(tape: Log, query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """In a thread, so that Ctrl-C is heard: DuckDB looks at signals between its tasks only, and one can take hours."""
    from concurrent.futures import ThreadPoolExecutor, wait

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(tape.sql, query)
        try:
            return asked.result()
        except KeyboardInterrupt:
            while not asked.done():  # again, in case the query was only about to begin
                tape.connection.interrupt()
                wait([asked], timeout=0.05)
            raise


def _record(columns: list[str], row: tuple[Any, ...]) -> dict[str, Any]:
    return {name: jsonable(value) for name, value in zip(columns, row, strict=True)}


def jsonable(value: Any) -> Any:
    """The JSON form of a DuckDB value: bytes as hex, times and the rest as text, numbers exact.

    JSON has no infinity and no NaN: they are the text `inf`, `-inf` or `nan`.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    return str(value)
