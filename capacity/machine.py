"""What this machine has free: of its memory, and of what a control group (a container, a service) may take of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from kvtape.capacity.errors import CapacityError

__all__ = ["free_memory", "whole_memory"]


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that can be had without swapping: MemAvailable where the kernel says it, else free pages.

    Inside memory control groups at most what is left below the tightest of their limits. Raises CapacityError where the
    system says nothing. `root` is the file system's.
    """
    return min([_available(root), *_left_in_groups(root)])


def whole_memory() -> int:
    """Bytes of the machine's memory, free or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _available(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        raise CapacityError(
            "this system does not say what memory is free; give its size in the place of auto"
        ) from None


def _left_in_groups(root: Path) -> Iterator[int]:
    """Bytes below the limit of this process's group and of every group above it, versions 1 and 2.

    A container sees its own group as the root of the tree, whatever path the kernel gives.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            tree = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            names = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
            )
            inside = PurePosixPath(path.lstrip("/"))
            for group in dict.fromkeys((inside, *inside.parents)):
                left = _left(tree / group, *names)
                if left is not None:
                    yield left


def _left(group: Path, limit_name: str, used_name: str) -> int | None:
    limit, used = _text(group / limit_name).strip(), _text(group / used_name).strip()
    if not limit.isdigit() or not used.isdigit():  # no such group, or its limit is `max`
        return None
    pairs = (line.split() for line in _text(group / "memory.stat").splitlines())
    cached = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
    # Clean file pages are given back on demand, so they do not count as used. Version 1 counts the whole tree apart.
    inactive = cached.get("total_inactive_file", cached.get("inactive_file", 0))
    return max(0, int(limit) - int(used) + inactive)


def _text(path: Path) -> str:
    """Of a file of the kernel's; nothing where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
