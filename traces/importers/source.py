"""One file or stdin as lines or bytes, with the line at hand, the digest of what was read, and what was seen twice.

Compression is told by the first bytes, so a pipe of gzip works like a `.gz` file.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

from kvtape.traces.importers.errors import SourceRejected
from kvtape.traces.telling import Tell

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["HEAD_BYTES", "MOST_LINE", "Source"]

HEAD_BYTES = 65_536
"""So much of the (uncompressed) beginning is looked at to recognise a format."""

MOST_LINE = 16 << 20
"""Of a longer line of a server's log only so many bytes are looked at."""

_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


class Source:
    """An input, opened. `name` is what messages call it, `line` the number of the line that was read last.

    Raises SourceRejected where there is no such file, and for damaged compression.
    """

    def __init__(self, path: str | Path) -> None:
        self.name = "stdin" if str(path) == "-" else str(path)
        self.stem = "stdin" if str(path) == "-" else Path(path).name
        self.line = 0
        self.repeated: list[int] = []
        self.leaves_out_repeated = False
        self._seen: set[bytes] = set()
        self._tap = _Tap(_open(path, self.name))
        packed = self._tap.peek(len(_GZIP)) == _GZIP
        self._fill = _Fill(gzip.GzipFile(fileobj=self._tap) if packed else self._tap)  # type: ignore[call-overload, arg-type]
        self._plain = io.BufferedReader(self._fill, HEAD_BYTES)
        with self._unpacking():
            self.head = self._plain.peek(HEAD_BYTES)

    def watch(self, tell: Tell) -> None:
        """From now on `tell` hears how many bytes of the file, packed as it may be, were taken; of stdin of how many
        is not known.
        """
        size = 0 if self.name == "stdin" else Path(self.name).stat().st_size
        self._tap.seen = lambda taken: tell(taken, size, f"bytes of {self.stem}")

    def lines(self, *, drop_repeated: bool = False) -> Iterator[bytes]:
        """Lines without their ends (LF or CRLF), blank ones left out.

        A line that was there before, byte for byte, is noted in `repeated`, and left out when that is asked for.
        """
        with self._unpacking():
            for number, raw in enumerate(self._plain, 1):
                self.line = number
                line = raw.removeprefix(_BOM) if self.line == 1 else raw
                line = line.strip()
                if not line:
                    continue
                key = hashlib.blake2b(line, digest_size=16).digest()
                if key in self._seen:
                    self.repeated.append(self.line)
                    self.leaves_out_repeated = drop_repeated
                    if drop_repeated:
                        continue
                else:
                    self._seen.add(key)
                yield line

    def text_lines(self, *, drop_repeated: bool = False) -> Iterator[str]:
        """`lines` as text. Raises SourceRejected where they are not UTF-8."""
        for line in self.lines(drop_repeated=drop_repeated):
            yield self.text(line)

    def text(self, line: bytes) -> str:
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as err:
            what = f"not UTF-8 at byte {err.start} of the line (0x{line[err.start]:02x})"
            raise self.rejected(None, what, "convert the file first, with iconv") from None

    def read(self) -> bytes:
        """Everything."""
        with self._unpacking():
            return self._plain.read()

    def digest(self) -> str:
        """SHA-256 hex over the plain bytes to the end of the file, so packed or not it is the same."""
        with self._unpacking():
            while self._plain.read(HEAD_BYTES):
                pass
        return self._fill.sha256.hexdigest()

    def rejected(self, field: str | None, what: str, remedy: str, *, whole: bool = False) -> SourceRejected:
        """The error for the line at hand, or for the `whole` file."""
        return SourceRejected(self.name, None if whole or not self.line else self.line, field, what, remedy)

    def _unpacking(self) -> _Unpacking:
        return _Unpacking(self)

    def close(self) -> None:
        self._tap.close()
        self._seen.clear()  # large, and of no use any more

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open(path: str | Path, name: str) -> IO[bytes]:
    if str(path) == "-":
        return sys.stdin.buffer
    file = Path(path)
    if not file.exists():
        raise SourceRejected(name, None, None, "no such file", "give a trace file, or - for stdin")
    if file.is_dir():
        raise SourceRejected(name, None, None, "a folder", "name the files in it, for example with a shell pattern")
    return file.open("rb")


class _Unpacking:
    """Damage of a gzip stream shows in the middle of a read, as errors of three kinds."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, EOFError | gzip.BadGzipFile | zlib.error):
            what = f"the compressed data is damaged or cut off ({error})"
            raise self._source.rejected(None, what, "fetch the file again") from None


class _Tap:
    """Looks at the first bytes of a stream before it is read."""

    def __init__(self, inner: IO[bytes]) -> None:
        self._inner = inner
        self._ahead = b""
        self._taken = 0
        self.seen: Callable[[int], None] = lambda taken: None

    def peek(self, n: int) -> bytes:
        self._ahead = self._inner.read(n)
        return self._ahead

    def read(self, n: int = -1) -> bytes:
        ahead, self._ahead = (self._ahead, b"") if n < 0 else (self._ahead[:n], self._ahead[n:])
        data = ahead + self._inner.read(n - len(ahead) if n >= 0 else -1)
        self._taken += len(data)
        self.seen(self._taken)
        return data

    def close(self) -> None:
        if self._inner is not sys.stdin.buffer:
            self._inner.close()


class _Fill(io.RawIOBase):
    """A raw stream over `read`: a pipe that gives little at a time still fills the whole buffer. Keeps a digest."""

    def __init__(self, inner: IO[bytes]) -> None:
        self.sha256 = hashlib.sha256()
        self._inner = inner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self._inner.read(len(view))
        self.sha256.update(data)
        view[: len(data)] = data
        return len(data)
