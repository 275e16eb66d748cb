"""Files that are being made beside the name they will get, and what is left of them when their maker was killed.

    <path>.new-1a2b3c4d*       a log or key before it gets its name, with whatever DuckDB puts beside it
    <path>.new-1a2b3c4d.lock   locked (flock) by the maker while it lives, so that nobody takes its files for leftovers
    <log>.sealing*             the sealed copy before it takes the log's place
    <log>.tmp                  rows of a long recording that DuckDB had no room for in memory

No reader ever takes one of them for a log. The next one that makes the same file removes what dead makers left.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtape.traces.spill import spill_path

__all__ = ["claimed", "dead_files", "leftovers", "sealing_path", "sweep"]

_MARK = ".new-"
_NAME = re.compile(r"\.new-[0-9a-f]{8}")


def sealing_path(log: Path) -> Path:
    return log.with_name(log.name + ".sealing")


@contextmanager
def claimed(path: Path) -> Iterator[Path]:
    """A name beside `path` for what will take its name; it and all that begins with it is removed at the end.

    Before that, what dead makers of `path` left is removed. Recorders that start together get names of their own.
    """
    sweep(path)
    fresh, descriptor = _claim(path)
    try:
        yield fresh
    finally:
        _remove(path, fresh.name)
        os.close(descriptor)


def _claim(path: Path) -> tuple[Path, int]:
    while True:
        fresh = path.with_name(f"{path.name}{_MARK}{secrets.token_hex(4)}")
        descriptor = os.open(_lock_path(fresh), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return fresh, descriptor
        os.close(descriptor)  # somebody took it for a leftover between the two calls


def _lock_path(fresh: Path) -> Path:
    return fresh.with_name(fresh.name + ".lock")


def sweep(path: Path) -> None:
    """Remove what dead makers of `path` left."""
    for name in sorted(_claims(path)):
        if not _is_held(path.with_name(name)):
            _remove(path, name)


def leftovers(*paths: Path) -> list[Path]:
    """What dead makers of these files left; of a log also its sealed copy and what had no room in
    memory, so ask only when nobody is recording it."""
    found: list[Path] = []
    for path in paths:
        dead = [name for name in sorted(_claims(path)) if not _is_held(path.with_name(name))]
        for name in (*dead, sealing_path(path).name, spill_path(path).name):
            found += _files(path, name)
    return found


def dead_files(folder: Path) -> list[Path]:
    """What dead makers left anywhere in a folder, whatever they were making."""
    made = {p.name[: found.start()] for p in _siblings(folder / "x") if (found := _NAME.search(p.name))}
    paths = [folder / name for name in sorted(made)]
    return [
        file
        for path in paths
        for name in sorted(_claims(path))
        if not _is_held(path.with_name(name))
        for file in _files(path, name)
    ]


def _claims(path: Path) -> set[str]:
    """Names that were claimed for `path`."""
    heads = (p.name[: len(path.name) + len(_MARK) + 8] for p in _siblings(path) if p.name.startswith(path.name + _MARK))
    return {head for head in heads if _NAME.fullmatch(head[len(path.name) :])}


def _files(path: Path, name: str) -> list[Path]:
    return sorted(p for p in _siblings(path) if p.name == name or p.name.startswith(name + "."))


def _siblings(path: Path) -> list[Path]:
    try:
        return list(path.parent.iterdir())
    except OSError:
        return []  # whoever needs the folder will say what is wrong with it


def _is_held(fresh: Path) -> bool:
    try:
        descriptor = os.open(_lock_path(fresh), os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove(path: Path, name: str) -> None:
    """The lock goes last: whoever finds none takes the rest for leftovers."""
    for file in sorted(_files(path, name), key=lambda f: f.name.endswith(".lock")):
        if file.is_dir():
            shutil.rmtree(file, ignore_errors=True)
        else:
            with suppress(FileNotFoundError):
                file.unlink()
