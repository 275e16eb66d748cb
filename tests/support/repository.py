"""What git tracks, and a copy of it: the tests of the repository look at what would be cloned, not at leftovers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

__all__ = ["ROOMS", "ROOT", "copy_rooms", "copy_tracked", "module_name", "room_files", "tracked_files"]

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("backends", "capacity", "cli", "eval", "planner", "replay", "report", "serve", "sim", "testing", "traces")


@cache
def tracked_files() -> tuple[str, ...]:
    """Paths of the tracked files that exist, relative to the root, `/` between the parts."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return tuple(name for name in listed.split("\0") if name and (ROOT / name).exists())


def room_files(suffix: str = ".py") -> list[str]:
    return [name for name in tracked_files() if name.split("/")[0] in ROOMS and name.endswith(suffix)]


def module_name(path: str) -> str:
    """`planner/ranges.py` -> `kvtape.planner.ranges`."""
    parts = path.removesuffix(".py").split("/")
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(["kvtape", *parts])


def copy_rooms(target: Path) -> None:
    """The rooms as a plain folder tree `target/kvtape/...`, as an installed wheel has them."""
    copy_tracked(target / "kvtape", room_files(suffix=""))


def copy_tracked(target: Path, names: Iterable[str] | None = None) -> None:
    """Tracked files, all or those of `names`, at their places under `target`; links to folders are left out."""
    for name in tracked_files() if names is None else names:
        if (ROOT / name).is_dir():
            continue
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy)
