"""What is free: of the machine, and of the control groups of either version that this process is in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtape.capacity.errors import CapacityError
from kvtape.capacity.machine import free_memory, whole_memory

GIB = 2**30


def machine(root: Path, cgroup: str, files: dict[str, str], available_kb: int = 8 * 2**20) -> Path:
    """A file system of a machine with 8 GiB available; `files` by path below /sys/fs/cgroup."""
    meminfo = f"MemTotal: 99 kB\nMemAvailable:   {available_kb} kB\n"
    texts = {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup}
    for name, text in (texts | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(path: str, limit: object, used: int, *, version: int, inactive: int = 0) -> dict[str, str]:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    stat = "inactive_file" if version == 2 else "total_inactive_file"
    return {
        f"{path}/{names[0]}": f"{limit}\n",
        f"{path}/{names[1]}": f"{used}\n",
        f"{path}/memory.stat": f"anon 5\n{stat} {inactive}\n",
    }


def test_this_machine_has_some() -> None:
    assert 2**20 < free_memory() < whole_memory() < 2**50


def test_without_groups_it_is_what_the_kernel_says(tmp_path: Path) -> None:
    assert free_memory(machine(tmp_path, "", {})) == 8 * GIB
    (tmp_path / "proc/self/cgroup").unlink()
    assert free_memory(tmp_path) == 8 * GIB


@pytest.mark.parametrize(
    ("cgroup", "files", "free"),
    [
        ("0::/\n", group("", 3 * GIB, GIB, version=2), 2 * GIB),
        ("0::/\n", group("", 3 * GIB, GIB, version=2, inactive=2**29), 2 * GIB + 2**29),
        ("0::/\n", group("", "max", GIB, version=2), 8 * GIB),
        ("0::/\n", group("", GIB, 2 * GIB, version=2), 0),
        ("0::/\n", group("", 99 * GIB, GIB, version=2), 8 * GIB),
        ("0::/a/b\n", group("a/b", "max", GIB, version=2) | group("a", 4 * GIB, GIB, version=2), 3 * GIB),
        ("0::/a/b\n", group("", 4 * GIB, GIB, version=2), 3 * GIB),
        ("5:cpu:/\n4:memory:/x\n0::/\n", group("memory/x", 2 * GIB, GIB, version=1), GIB),
        ("4:memory,hugetlb:/x\n", group("memory", 2 * GIB, GIB, version=1, inactive=2**29), GIB + 2**29),
        ("4:memory:/\n", group("memory", 9223372036854771712, GIB, version=1), 8 * GIB),
    ],
)
def test_what_is_left_of_the_tightest_group(tmp_path: Path, cgroup: str, files: dict[str, str], free: int) -> None:
    assert free_memory(machine(tmp_path, cgroup, files)) == free


def test_a_system_without_meminfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", known.__getitem__)
    assert free_memory(tmp_path) == 4_096_000

    def unknown(name: str) -> int:
        raise ValueError(f"unrecognized configuration name: {name}")

    monkeypatch.setattr(os, "sysconf", unknown)
    with pytest.raises(CapacityError, match="give its size in the place of auto"):
        free_memory(tmp_path)
