"""Stored token ids against their keyed hashes, which are what the chain covers of them. Needs the log's key."""

from __future__ import annotations

from collections.abc import Iterator

import duckdb

from kvtape.traces.findings import Finding, FindingKind
from kvtape.traces.schema import TOKENS
from kvtape.traces.tape import content_mac

__all__ = ["check_content", "holds_content"]

_FETCHED_ROWS = 4096


def holds_content(connection: duckdb.DuckDBPyConnection) -> bool:
    return bool(connection.execute("SELECT 1 FROM tokens WHERE tokens IS NOT NULL LIMIT 1").fetchall())


def check_content(connection: duckdb.DuckDBPyConnection, key: bytes) -> Iterator[Finding]:
    """One finding for each row whose token ids are not the recorded ones. Rows without ids are passed over."""
    order = ", ".join(TOKENS.order)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT batch, run_id, session_id, seq, start, mac, tokens FROM tokens WHERE tokens IS NOT NULL "
            f"ORDER BY {order}"
        )
        while rows := cursor.fetchmany(_FETCHED_ROWS):
            for batch, run, session, seq, start, mac, tokens in rows:
                if content_mac(key, start, tokens) != mac:
                    detail = f"batch {batch}: the token ids of {run}/{session} seq {seq} are not what was recorded"
                    yield Finding(FindingKind.CONTENT, detail, batch, TOKENS.name)
