"""Small files of the user's own: where they stand, and writing them so that nobody finds half of one."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtape.traces.sidecar import replace_file

__all__ = ["alone", "data_file", "write_whole"]


def data_file(name: str, variable: str) -> Path:
    """`name` in kvtape's data folder of the user ($XDG_DATA_HOME, else ~/.local/share), or what `variable` names."""
    named = os.environ.get(variable)
    if named:
        return Path(named)
    base = os.environ.get("XDG_DATA_HOME")
    # A relative path there is to be ignored, says the XDG specification.
    folder = Path(base) if base and Path(base).is_absolute() else Path.home() / ".local" / "share"
    return folder / "kvtape" / name


def write_whole(path: Path, content: str | bytes) -> None:
    """Write bytes, or text as UTF-8, beside `path`, then rename: whoever reads finds the old file or the new one.

    A link stays one, and the file that it names is written. What is no file, like /dev/null, /dev/stdout or a pipe, is
    written into: a rename would put a file in its place.

    Raises OSError, which names `path`, and leaves nothing of its own behind.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content.encode() if isinstance(content, str) else content)
            return
        # Two processes that write one file must not rename each other's half.
        replace_file(Path(os.path.realpath(path)), content, beside=f".{os.getpid()}.new")
    except OSError as err:
        raise OSError(err.errno, err.strerror, str(path)) from None


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """The only writer of `path` among all processes, while the block runs; others wait.

    The lock is a file beside it that stays: one that is removed could be locked twice. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
