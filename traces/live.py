"""Reading a log that somebody is recording: work on copies, never on the recorder's files.

The order of copying matters: sidecar, then file, then write-ahead log. A batch is acknowledged in the sidecar after it
is in the write-ahead log, so whatever the copied sidecar says is then in the copied log; the other way round a batch
that came between the two copies would look like a lost tail.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtape.traces.database import COPY_NAME, open_read_only, read_meta, wal_path
from kvtape.traces.errors import LogUnreadable
from kvtape.traces.sidecar import head_path

__all__ = ["drop_stale_wal", "held_elsewhere", "recorded_here", "recording", "snapshot"]

_ATTEMPTS = 20
_PAUSE_S = 0.05

_lock = threading.Lock()
_open_here: dict[str, int] = {}


@contextmanager
def recording(log: Path) -> Iterator[None]:
    """Marks `log` as open for writing in this process."""
    name = str(log.resolve())
    with _lock:
        _open_here[name] = _open_here.get(name, 0) + 1
    try:
        yield
    finally:
        with _lock:
            _open_here[name] -= 1
            if not _open_here[name]:
                del _open_here[name]


def recorded_here(log: Path) -> bool:
    with _lock:
        return str(log.resolve()) in _open_here


def held_elsewhere(log: Path) -> bool:
    """Whether another process has the file open for recording (its lock, which a dead process does not keep)."""
    if recorded_here(log):
        return False  # and opening it here would give that lock up
    whole_file = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with log.open("rb") as handle:
        found = fcntl.fcntl(handle, fcntl.F_GETLK, whole_file)
    return bool(struct.unpack("hhqqi4x", found)[0] == fcntl.F_WRLCK)


def snapshot(log: Path, folder: Path) -> Path:
    """Copy sidecar, file and write-ahead log into `folder`; the path of the copy.

    Copies again when a file was replaced meanwhile (the log was sealed), or the first sidecar came. Raises
    LogUnreadable when that goes on.
    """
    target = folder / COPY_NAME
    sources = (head_path(log), log, wal_path(log))
    targets = (head_path(target), target, wal_path(target))
    copy = _copy_elsewhere if recorded_here(log) else _copy_all
    for _ in range(_ATTEMPTS):
        before = _identity(log), _identity(wal_path(log))
        copy(sources, targets)
        has_head = head_path(target).exists() or not head_path(log).exists()
        if before == (_identity(log), _identity(wal_path(log))) and target.exists() and has_head:
            return target
        time.sleep(_PAUSE_S)
    raise LogUnreadable(f"{log}: its files keep being replaced; try again when the recorder is done")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _copy_all(sources: Sequence[Path], targets: Sequence[Path]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            shutil.copyfile(source, target)


_COPY_SCRIPT = """
import sys
for source, target in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        with open(source, "rb") as read, open(target, "wb") as write:
            while chunk := read.read(1 << 20):
                write.write(chunk)
    except FileNotFoundError:
        pass
"""


def _copy_elsewhere(sources: Sequence[Path], targets: Sequence[Path]) -> None:
    """Copy in a child: a process that opens and closes a file gives up all its POSIX locks on it, DuckDB's too."""
    for target in targets:
        target.unlink(missing_ok=True)
    pairs = [str(path) for pair in zip(sources, targets, strict=True) for path in pair]
    subprocess.run([sys.executable, "-I", "-S", "-c", _COPY_SCRIPT, *pairs], check=True)


def drop_stale_wal(copy: Path, shown: Path) -> bool:
    """A crash after the sealed file got its name leaves the old write-ahead log. Whether that is so here."""
    wal = wal_path(copy)
    if not wal.exists():
        return False
    aside = wal.with_name("aside.wal")
    wal.rename(aside)
    connection = open_read_only(copy, shown)
    try:
        sealed = "sealed" in read_meta(connection, shown)
    finally:
        connection.close()
    if not sealed:
        aside.rename(wal)
    return sealed
