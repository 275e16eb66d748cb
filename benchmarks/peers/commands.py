"""Commands, timed: both sides of a comparison are measured by the same few lines."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Timed", "timed"]


@dataclass(frozen=True)
class Timed:
    """Wall and processor seconds, peak memory of the process, and the JSON that it printed or wrote."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    said: Any


def timed(command: Sequence[str | Path], written: Path | None = None) -> Timed:
    """Run it. What it says is read from `written`, or else from stdout. Raises CalledProcessError."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE if written is None else subprocess.DEVNULL) as process:
        out = process.stdout.read() if process.stdout is not None else b""
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - began
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    said = json.loads(out if written is None else written.read_bytes())
    return Timed(wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, said)
