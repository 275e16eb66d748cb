"""Files that a command is given, and files that it writes: whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["is_database", "write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Write `text` as UTF-8 beside `path`, then rename: whoever reads finds the old file or the new one.

    Raises OSError, which names `path`, and leaves nothing of its own behind.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # Two processes that write one file must not rename each other's half.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with temporary.open("w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as err:
        temporary.unlink(missing_ok=True)
        raise OSError(err.errno, err.strerror, str(path)) from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def is_database(path: Path) -> bool:
    """Whether a file is a DuckDB file, by its first bytes. Raises OSError where there is none that can be read."""
    with path.open("rb") as handle:
        return handle.read(12)[8:] == b"DUCK"
