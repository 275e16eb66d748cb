"""Files that a command is given, and files that it writes: whole or not at all."""

from __future__ import annotations

from pathlib import Path

from kvtape.backends.user_files import write_whole

__all__ = ["is_database", "write_whole"]


def is_database(path: Path) -> bool:
    """Whether a file is a DuckDB file, by its first bytes. Raises OSError where there is none that can be read."""
    with path.open("rb") as handle:
        return handle.read(12)[8:] == b"DUCK"
