"""The machine's class: what results and speed depend on, and no name of a host.

Engines pick their kernels by instruction set, and kernels differ in the last bits; so a row that was measured with
one set says nothing about another. How many cores there are matters to speed alone.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["class_of", "machine_class", "speed_class"]

_SETS: Final = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
    "sve2",
)
"""Instruction sets, as /proc/cpuinfo writes them, for which llama.cpp or OpenVINO's CPU plugin have own kernels."""

_CPUINFO = Path("/proc/cpuinfo")


def class_of(architecture: str, flags: Iterable[str]) -> str:
    """`x86_64+avx2+avx512f+...`: the sets of `_SETS` among `flags`, in that order; `architecture` alone without."""
    there = frozenset(flags)
    return "+".join((architecture.lower(), *(name for name in _SETS if name in there)))


@cache
def machine_class() -> str:
    """The class that results depend on. The system's name is added outside Linux, where the sets are not told."""
    if sys.platform != "linux":
        return class_of(f"{platform.machine()}-{sys.platform}", ())
    return class_of(platform.machine(), _flags())


def speed_class() -> str:
    """The class that times depend on: as `machine_class`, and the power of two that the cores reach."""
    cores = os.cpu_count() or 1
    return f"{machine_class()}/{1 << (cores.bit_length() - 1)}-core"


def _flags() -> list[str]:
    """Of the first processor; `flags` on x86, `Features` on ARM."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return value.split()
    return []
