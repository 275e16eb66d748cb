"""Pieces of input as lines, with the place that was reached: what a follower notes so that another can go on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtape.traces.importers.source import MOST_LINE
from kvtape.traces.importers.tail import Piece

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["LineFeed", "Part"]


@dataclass(frozen=True, slots=True)
class Part:
    """So many bytes from the beginning of one file, and their SHA-256 (hex)."""

    n_bytes: int
    sha256: str


class LineFeed:
    """Whole lines, ends included; of one longer than `MOST_LINE` the beginning. `line` counts them, blank ones too.

    Args:
        line: lines before the first piece.
        n_bytes, digest: bytes of its file before the first piece, and the hash object that has seen them.
    """

    def __init__(self, line: int = 0, n_bytes: int = 0, digest: _Hash | None = None) -> None:
        self.line = line
        self.too_long = self.cut = 0
        self._hash = digest or hashlib.sha256()
        self._bytes = n_bytes
        self._before: list[Part] = []
        self._partial = bytearray()
        self._whole = n_bytes, self._hash.copy()

    def push(self, piece: Piece) -> Iterator[bytes]:
        """The lines that the piece ends."""
        if piece.begins:
            yield from self.rest()
            self._before.append(self._part())
            self._hash, self._bytes = hashlib.sha256(), 0
            self._whole = 0, self._hash.copy()
            self.cut += piece.cut
        at, data = 0, piece.data
        while (end := data.find(b"\n", at) + 1) > 0:
            self._grow(data[at:end])
            yield self._line()
            at = end
        self._grow(data[at:])

    def rest(self) -> Iterator[bytes]:
        """The line that has no end, as the input has one here."""
        if self._partial:
            yield self._line()

    def parts(self) -> tuple[Part, ...]:
        """The files so far, up to the end of the last line."""
        return (*self._before, self._part())

    def _part(self) -> Part:
        return Part(self._whole[0], self._whole[1].hexdigest())

    def _grow(self, data: bytes) -> None:
        self._hash.update(data)
        self._bytes += len(data)
        room = MOST_LINE - len(self._partial)
        self.too_long += len(data) > room > 0
        self._partial += data[: max(0, room)]

    def _line(self) -> bytes:
        line = bytes(self._partial)
        self._partial.clear()
        self._whole = self._bytes, self._hash.copy()
        self.line += 1
        return line
