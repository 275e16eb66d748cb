"""What this machine has free."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["free_memory"]


def free_memory() -> int:
    """Bytes that can be had without swapping: MemAvailable where the kernel says it, else free pages.

    Inside a memory control group at most what is left of its limit.
    """
    free = _available()
    group = _group_left()
    return free if group is None else min(free, group)


def _available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_left(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes below the limit of the control group (v2) that a container sees as its root; None without a limit."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        cached = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    # Clean file pages are given back on demand, so they do not count as used.
    return max(0, int(limit) - used + int(cached.get("inactive_file", 0)))
