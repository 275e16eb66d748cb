"""Input that grows, piece by piece: a file through its rotations as `tail -F` follows it, or a pipe.

    renamed, a new file under the name    the old one is read to its end, then the new one
    cut (copytruncate)                    the file is begun again; what nobody looked at in between is gone
    not there                             waited for

A cut file that has grown past the old place is told by the bytes before that place, which each read looks at again.
"""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvtape.traces.importers.errors import SourceRejected

__all__ = ["Extent", "FileTail", "Piece", "PipeTail", "Tail"]

_PIECE = 65_536
_OVERLAP = 256
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that are new. `begins`: the first of another file, so no line goes on over the border; `cut`: because the
    file was cut.
    """

    data: bytes
    begins: bool = False
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [start, stop) of a file; to its end where `stop` is None."""

    path: Path
    start: int = 0
    stop: int | None = None


class Tail(Protocol):
    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def there(self) -> bool:
        """Whether there has been anything to read from."""

    def look(self) -> Piece | None:
        """What is new, at most 64 KiB: empty where nothing is, None at the end. Raises SourceRejected."""

    def close(self) -> None: ...


class PipeTail:
    """What comes through a descriptor until the other side closes it."""

    there = True

    def __init__(self, descriptor: int, name: str = "stdin") -> None:
        self.name = name
        self._descriptor = descriptor

    def look(self) -> Piece | None:
        if not select.select([self._descriptor], [], [], 0)[0]:
            return Piece(b"")
        data = os.read(self._descriptor, _PIECE)
        return Piece(data) if data else None

    def close(self) -> None:
        """The descriptor is its owner's."""


class FileTail:
    """A file by its name. `before`: what is read first; `start`: where the file that has the name now is begun."""

    def __init__(self, path: Path, before: Sequence[Extent] = (), start: int = 0) -> None:
        self.name = str(path)
        self.there = False
        self._path = path
        self._extents = [*before, Extent(path, start)]
        self._open: _Opened | None = None

    def look(self) -> Piece | None:
        if self._open is None and not self._open_next():
            return Piece(b"")
        assert self._open is not None
        piece = self._open.read()
        if not piece.data and self._left():
            piece = self._open.read()  # what was written just before it lost its name
            if not piece.data:
                self.close()
        return piece

    def _open_next(self) -> bool:
        extent = self._extents[0] if self._extents else Extent(self._path)
        descriptor = _descriptor(extent.path, self.name)
        if descriptor is None:
            return False
        self._open = _Opened(descriptor, extent, self.name, begins=self.there)
        del self._extents[:1]
        self.there = True
        return True

    def _left(self) -> bool:
        """Whether another file comes next: this one was to be read before, or has lost its name to another."""
        assert self._open is not None
        return bool(self._extents) or self._open.lost(self._path)

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open.descriptor)
            self._open = None


class _Opened:
    """A file as far as it was read."""

    def __init__(self, descriptor: int, extent: Extent, name: str, *, begins: bool) -> None:
        self.descriptor = descriptor
        self._name = name
        self._at, self._stop = extent.start, extent.stop
        self._last = b""
        self._begins, self._cut = begins, False

    def read(self) -> Piece:
        most = _PIECE if self._stop is None else min(_PIECE, self._stop - self._at)
        found = os.pread(self.descriptor, len(self._last) + most, self._at - len(self._last))
        if not found.startswith(self._last) or os.fstat(self.descriptor).st_size < self._at:
            self._at, self._last, self._begins, self._cut = 0, b"", True, True
            found = os.pread(self.descriptor, _PIECE, 0)
        data = found[len(self._last) :]
        if not data:
            return Piece(b"")
        if self._at == 0 and data.startswith(_GZIP):
            raise SourceRejected(self._name, None, None, "packed, so it does not grow", "import it without --follow")
        self._at += len(data)
        self._last = found[-_OVERLAP:]
        piece = Piece(data, self._begins, self._cut)
        self._begins = self._cut = False
        return piece

    def lost(self, path: Path) -> bool:
        """Whether the name is another file's by now. As long as it is nobody's, more may come."""
        try:
            named = path.stat()
        except OSError:
            return False
        own = os.fstat(self.descriptor)
        return (named.st_dev, named.st_ino) != (own.st_dev, own.st_ino)


def _descriptor(path: Path, name: str) -> int | None:
    """The file, opened; None where there is none. Raises SourceRejected."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as err:
        raise SourceRejected(name, None, None, f"cannot be read ({err.strerror})", "give another file") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SourceRejected(name, None, None, "no ordinary file", "give a log file, or pipe it in and name it -")
    return descriptor
