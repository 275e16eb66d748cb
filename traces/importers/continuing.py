"""Where a follower begins: a new log, one that a dead follower left, or the next segment of a log folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from kvtape.traces.database import refuse_leftovers
from kvtape.traces.errors import LogExists, TraceError
from kvtape.traces.folder import new_segment, segments
from kvtape.traces.importers.marks import Mark, Place, go_on, read_again, read_mark, source_id
from kvtape.traces.importers.protocol import Reader
from kvtape.traces.importers.registry import READERS
from kvtape.traces.importers.tail import PipeTail, Tail
from kvtape.traces.reader import open_log
from kvtape.traces.seal import seal_log
from kvtape.traces.writer import LogWriter

__all__ = ["Beginning", "begin", "followable"]


@dataclass(frozen=True, slots=True)
class Beginning:
    """`log`: the file to write; `resume`: it is there, unsealed. `note`: one line for people, where there is news."""

    log: Path
    tail: Tail
    place: Place
    source: str | None
    resume: bool = False
    in_folder: bool = False
    note: str | None = None


def followable(format_name: str) -> Reader:
    """The reader of that name, of a format whose own order counts. Raises TraceError."""
    names = [reader.name for reader in READERS if reader.rules.ordered]
    found = next((r for r in READERS if r.name == format_name), None)
    if found is not None and found.rules.ordered:
        return found
    what = "what grows is not recognised by its beginning" if format_name == "auto" else f"{format_name} does not grow"
    raise TraceError(f"{what}; --follow takes --format {' or '.join(names)}")


def begin(file: str, log: Path, reader: Reader, *, content: bool) -> Beginning:
    """Raises TraceError where the log is another's or its source is gone, LogExists, LogUnreadable, NotALog."""
    if file == "-":
        return _pipe(log)
    path = Path(file)
    mark = Mark(source_id(path), reader.name, content, 0, 0, 0, ())
    return _in_folder(path, log, mark) if log.is_dir() else _single(path, log, mark)


def _pipe(log: Path) -> Beginning:
    tail = PipeTail(sys.stdin.fileno())
    if log.is_dir():
        return Beginning(new_segment(log), tail, Place(), None, in_folder=True)
    resume = _is_there(log)
    note = f"{log} goes on: what it has is expected to come again first" if resume else None
    return Beginning(log, tail, Place(), None, resume, note=note)


def _single(path: Path, log: Path, wanted: Mark) -> Beginning:
    if not _is_there(log):
        return Beginning(log, Place().tail(path), Place(), wanted.source)
    mark = read_mark(log)
    if mark is not None and _key(mark) != _key(wanted):
        raise TraceError(f"{log}: follows another file, format or --content; give the command it was begun with")
    place = Place() if mark is None else read_again(path, mark)
    if place is None:
        raise TraceError(
            f"{path}: what {log} was made of is not there any more, nor beside it under a longer name; end the log "
            f"with `kvtape repair {log} --out NEW`, and follow into another one"
        )
    note = f"{log} goes on where it stopped"
    return Beginning(log, place.tail(path), place, wanted.source, resume=True, note=note)


def _is_there(log: Path) -> bool:
    """Whether there is a log to go on with. Raises LogExists for a sealed one, LogUnreadable."""
    if not log.exists():
        refuse_leftovers(log)
        return False
    if _sealed(log):
        raise LogExists(f"{log}: sealed, so it is finished; give --log a folder, where each start gets a segment")
    return True


def _sealed(log: Path) -> bool:
    """Also of one whose follower died between its last rows, the ends of the sessions, and the sealing: now it is."""
    with open_log(log) as tape:
        if tape.sealed:
            return True
        ended = tape.sql("SELECT count(*) FROM events WHERE op = 'close'")[1][0][0]
    if ended:
        seal_log(LogWriter.resume(log))
    return bool(ended)


def _key(mark: Mark) -> tuple[str, str, bool]:
    return mark.source, mark.format, mark.content


def _in_folder(path: Path, folder: Path, wanted: Mark) -> Beginning:
    found = _last_of(folder, wanted)
    if found is None:
        return Beginning(new_segment(folder), Place().tail(path), Place(), wanted.source, in_folder=True)
    segment, mark = found
    if not _sealed(segment):
        place = read_again(path, mark)
        if place is not None:
            note = f"{segment} goes on where it stopped"
            return Beginning(segment, place.tail(path), place, wanted.source, resume=True, in_folder=True, note=note)
        seal_log(LogWriter.resume(segment))  # its sessions are without an end, like those of any recorder that died
    place = go_on(path, mark)
    note = f"goes on behind line {mark.line}, where {segment.name} ends"
    if place is None:
        note = f"the file in which {segment.name} ends is gone: {path} is followed from its beginning"
        place = Place()
    return Beginning(new_segment(folder), place.tail(path), place, wanted.source, in_folder=True, note=note)


def _last_of(folder: Path, wanted: Mark) -> tuple[Path, Mark] | None:
    """The last segment that was made of this source in this way, with its mark."""
    new_segment(folder)  # refuses a folder of something else
    for segment in reversed(segments(folder)):
        mark = read_mark(segment.path) if segment.there else None
        if mark is not None and _key(mark) == _key(wanted):
            return segment.path, mark
    return None
