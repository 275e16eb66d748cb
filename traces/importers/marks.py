"""How far a follower has come, in a file beside its log (`<log>.follow.json`), and finding that place again.

The log itself says which events it has. The mark says of which bytes they were made, so that they can be read again:
a follower that goes on reads them once more, and leaves out what is there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtape.traces.errors import LogUnreadable
from kvtape.traces.importers.feed import LineFeed, Part
from kvtape.traces.importers.tail import Extent, FileTail
from kvtape.traces.sidecar import replace_file

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["Mark", "Place", "drop_mark", "go_on", "mark_path", "read_again", "read_mark", "source_id", "write_mark"]

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Mark:
    """`source`: keyed by nothing but its place, so that two files are told apart; `start`: bytes of the first part that
    an earlier log has, and `start_line` the lines before. `parts`: the files that were read, in order; `line`: lines so
    far.
    """

    source: str
    format: str
    content: bool
    start: int
    start_line: int
    line: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where to begin: files to be read before, the byte of the followed file, and the lines and bytes before."""

    before: tuple[Extent, ...] = ()
    start: int = 0
    line: int = 0
    skipped: int = 0
    digest: _Hash | None = None

    def tail(self, path: Path) -> FileTail:
        """Of the followed file, from here on."""
        return FileTail(path, self.before, self.start)

    def feed(self) -> LineFeed:
        return LineFeed(self.line, self.skipped, None if self.digest is None else self.digest.copy())


def source_id(path: Path) -> str:
    """Of the file's place on this machine; nothing of it can be read from the id."""
    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]


def mark_path(log: Path) -> Path:
    return log.with_name(log.name + ".follow.json")


def write_mark(log: Path, mark: Mark) -> None:
    """Replace the mark; a crash leaves the old one or the new one. Raises OSError."""
    replace_file(mark_path(log), json.dumps(asdict(mark), sort_keys=True, separators=(",", ":")))


def drop_mark(log: Path) -> None:
    mark_path(log).unlink(missing_ok=True)


def read_mark(log: Path) -> Mark | None:
    """The mark; None where there is none. Raises LogUnreadable."""
    path = mark_path(log)
    try:
        data = json.loads(path.read_bytes())
        parts = tuple(Part(int(p["n_bytes"]), str(p["sha256"])) for p in data.pop("parts"))
        return Mark(**data, parts=parts)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as err:
        raise LogUnreadable(f"{path}: damaged ({type(err).__name__}); put it back, or follow into a new log") from err


def read_again(path: Path, mark: Mark) -> Place | None:
    """Everything that the mark's log was made of, from its beginning; None where some of it cannot be found."""
    found = _find(path, mark.parts)
    if found is None:
        return None
    digest = _digest(found[0], mark.start)
    assert digest is not None
    extents = [Extent(file, 0, part.n_bytes) for file, part in zip(found, mark.parts, strict=True)]
    extents[0] = Extent(found[0], mark.start, extents[0].stop)
    return _place(path, extents, mark.start_line, mark.start, digest)


def go_on(path: Path, mark: Mark) -> Place | None:
    """What came behind the mark; None where the file that it ends in cannot be found."""
    last = mark.parts[-1]
    found = _find(path, [last])
    if found is None:
        return None
    digest = _digest(found[0], last.n_bytes)
    assert digest is not None
    return _place(path, [Extent(found[0], last.n_bytes)], mark.line, last.n_bytes, digest)


def _place(path: Path, extents: list[Extent], line: int, skipped: int, digest: _Hash) -> Place:
    """The last file is read to its end; where it is not the followed one, so are those that were begun after it."""
    last = extents.pop()
    start = last.start
    if last.path != path:
        born = last.path.stat().st_mtime_ns
        used = {last.path, *(e.path for e in extents)}
        later = [p for p in _rotated(path) if p not in used and p.stat().st_mtime_ns > born]
        later.sort(key=lambda p: p.stat().st_mtime_ns)
        extents += [Extent(last.path, last.start), *(Extent(p) for p in later)]
        start = 0
    return Place(tuple(extents), start, line, skipped, digest)


def _find(path: Path, parts: Sequence[Part]) -> list[Path] | None:
    """For each part the file that begins with it: the followed one, or one that it was renamed or copied to."""
    found: list[Path] = []
    for number, part in enumerate(parts):
        here = [path] if number == len(parts) - 1 else []
        fits = (p for p in [*here, *_rotated(path)] if p not in found and _begins_with(p, part))
        file = next(fits, None)
        if file is None:
            return None
        found.append(file)
    return found


def _rotated(path: Path) -> list[Path]:
    """Files beside it whose names begin with its own."""
    if not path.parent.is_dir():
        return []
    return sorted(p for p in path.parent.iterdir() if p.name.startswith(path.name) and p != path and p.is_file())


def _begins_with(path: Path, part: Part) -> bool:
    digest = _digest(path, part.n_bytes)
    return digest is not None and digest.hexdigest() == part.sha256


def _digest(path: Path, n_bytes: int) -> _Hash | None:
    """Over the first `n_bytes`; None where the file has fewer, or is not there."""
    digest, left = hashlib.sha256(), n_bytes
    try:
        with path.open("rb") as handle:
            while left and (data := handle.read(min(_CHUNK, left))):
                digest.update(data)
                left -= len(data)
    except OSError:
        return None
    return None if left else digest
