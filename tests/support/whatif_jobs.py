"""Jobs for the executors of a what-if that do not simulate: they die, hang or fail where a test wants it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from kvtape.backends.errors import UsageError

__all__ = ["die_at", "die_once", "fail_at", "sleep"]


def die_at(subject: int, task: int) -> int:
    """Ten times the task; the task that the subject names is not survived."""
    if task == subject:
        os.kill(os.getpid(), signal.SIGKILL)
    return 10 * task


def die_once(subject: str, task: int) -> int:
    """Ten times the task; the first process that comes to task 1 dies, and leaves the file `subject` behind.

    Task 666 is not survived.
    """
    trace = Path(subject)
    if task == 666 or (task == 1 and not trace.exists()):
        trace.write_text("was here", encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)
    return 10 * task


def fail_at(subject: int, task: int) -> int:
    if task == subject:
        raise UsageError(f"task {task} is refused")
    return 10 * task


def sleep(subject: float, task: int) -> int:
    time.sleep(subject)
    return 10 * task
