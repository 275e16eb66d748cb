"""Signals stay where they were handled: compiling a model gives the calling thread another signal stack.

OpenVINO's CPU plugin installs an alternate signal stack of its own (sigaltstack, 11,568 bytes in 2026.4.1) on the
thread that compiles, and does not take it back; once that memory is gone, the next Ctrl-C ends the process, since
Python handles signals on the alternate stack where there is one.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["kept_signal_stack", "signal_stack"]

_DISABLED = 2  # SS_DISABLE


class _Stack(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def signal_stack() -> tuple[int, int] | None:
    """Address and size in bytes of this thread's alternate signal stack; None without one, or away from Linux."""
    if sys.platform != "linux":
        return None
    now = _Stack()
    ctypes.CDLL(None).sigaltstack(None, ctypes.byref(now))
    return None if now.flags & _DISABLED else (int(now.base or 0), int(now.size))


@contextmanager
def kept_signal_stack() -> Iterator[None]:
    """What this thread had before is there again afterwards, also after an exception."""
    before = signal_stack()
    try:
        yield
    finally:
        if signal_stack() != before:
            again = _Stack(None, _DISABLED, 0) if before is None else _Stack(before[0], 0, before[1])
            ctypes.CDLL(None).sigaltstack(ctypes.byref(again), None)
