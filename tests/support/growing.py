"""A file that grows while it is followed, in a test's own time: what happens next happens when the follower waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvtape.traces.importers.continuing import begin, followable
from kvtape.traces.importers.follow import Followed, Follower
from kvtape.traces.importers.followed import Patience
from kvtape.traces.importers.importing import ImportResult
from kvtape.traces.reader import open_log

__all__ = ["Killed", "ScriptedPace", "appended", "cut_away", "followed", "killed", "logical_digest", "renamed"]

Act = Callable[[], object]


class Killed(BaseException):
    """The follower dies here, with whatever it has not committed."""


class ScriptedPace:
    """Each pause takes as long as it is asked to, and one act is done in it; after the last act it is stopped, unless
    `until_quiet`: then time alone goes on.
    """

    def __init__(self, acts: Iterable[Act], *, until_quiet: bool = False) -> None:
        self._acts = list(acts)
        self._until_quiet = until_quiet
        self._now = 0
        self.pauses: list[float] = []
        self.stopped = False

    def now_ns(self) -> int:
        self._now += 1_000
        return self._now

    def pause(self, seconds: float) -> None:
        self._now += int(seconds * 1e9)
        self.pauses.append(seconds)
        if self._acts:
            self._acts.pop(0)()
        elif not self._until_quiet:
            self.stopped = True


def appended(file: Path, data: bytes) -> Act:
    def act() -> None:
        with file.open("ab") as handle:
            handle.write(data)

    return act


def renamed(file: Path, number: int) -> Act:
    """As logrotate does: another name, and a new file under the old one."""

    def act() -> None:
        file.rename(file.with_name(f"{file.name}.{number}"))
        file.touch()

    return act


def cut_away(file: Path, number: int, *, keep: bool = True) -> Act:
    """As logrotate's copytruncate does; without `keep` the copy is gone at once."""

    def act() -> None:
        if keep:
            file.with_name(f"{file.name}.{number}").write_bytes(file.read_bytes())
        with file.open("r+b") as handle:
            handle.truncate(0)

    return act


def killed() -> None:
    raise Killed


def followed(
    file: Path,
    log: Path,
    acts: Iterable[Act],
    *,
    format_name: str = "llama-server",
    until_quiet: bool = False,
    **patience: Any,
) -> tuple[ImportResult, Follower, ScriptedPace]:
    """Follow through the acts and to the end. Raises what following raises, Killed where an act says so."""
    pace = ScriptedPace(acts, until_quiet=until_quiet)
    reader = followable(format_name)
    start = begin(str(file), log, reader, content=False)
    how = Followed(
        reader, start.tail, start.place, start.source, Patience(**patience), keep_mark=start.in_folder, content=False
    )
    follower = Follower(how, start.log, pace, kvtape_version="0.1.0", resume=start.resume)
    return follower.run(), follower, pace


def logical_digest(log: Path) -> str:
    with open_log(log) as tape:
        return tape.logical_digest()
