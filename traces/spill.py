"""What DuckDB keeps of a log in memory while it is recorded: all of it up to a limit, beyond it in a folder beside.

Rows that were not checkpointed are in memory beside the write-ahead log, and a log is not checkpointed before it is
sealed. Without a limit a recording that goes on for weeks would grow by its whole log.

    <log>.tmp    rows that had no room, compressed, for this process alone: no reader needs them, a crash may leave them
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import duckdb

__all__ = ["MEMORY_LIMIT", "limit_memory", "spill_path", "unlimited_memory"]

MEMORY_LIMIT: Final = "256MiB"
"""About a million events with small prompts. A transaction needs a few MiB of it."""


def spill_path(log: Path) -> Path:
    """The folder in which DuckDB puts what it has no room for."""
    return log.with_name(log.name + ".tmp")


def limit_memory(connection: duckdb.DuckDBPyConnection, limit: str = MEMORY_LIMIT) -> None:
    """From now on; what is over it now goes at once."""
    connection.execute(f"SET memory_limit = '{limit}'")


def unlimited_memory(connection: duckdb.DuckDBPyConnection) -> None:
    """DuckDB's own limit again, for work on the whole log."""
    connection.execute("RESET memory_limit")
