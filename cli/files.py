"""Files that a command writes: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Write `text` as UTF-8 beside `path`, then rename: whoever reads finds the old file or the new one.

    Raises OSError, and leaves nothing of its own behind.
    """
    temporary = path.with_name(f"{path.name}.new")
    try:
        with temporary.open("w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
