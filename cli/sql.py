"""`kvtape sql`: any question, read-only."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from kvtape.cli.args import AsJson, LogPath

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
        columns, rows = tape.sql(text)
        twice = sorted({name for name in columns if columns.count(name) > 1})
        if as_json and twice:
            raise UsageError(f"--json names values by their columns, and {', '.join(twice)} is there twice; use AS")
        body = {"columns": list(columns), "rows": [_record(columns, row) for row in rows]}
        section = Section(None, tuple(columns), rows)
        emit("sql", body, [section], as_json=as_json, digest=tape.chain_digest, digest_kind="chain")


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
