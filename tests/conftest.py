"""What every test relies on."""

import ctypes
import signal
import sys

# Before any test module imports openvino itself: the backend's package takes its reporter out first.
from hypothesis import settings

import kvtape.backends.openvino  # noqa: F401

# How long one example takes says more about the machine than about the code; the timeout of a test still holds.
settings.register_profile("kvtape", deadline=None)
settings.load_profile("kvtape")

# A job in the background inherits that Ctrl-C is ignored, and would wait for the one that a test sends to itself.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _SignalStack(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


_NO_STACK = _SignalStack(None, 2, 0)  # SS_DISABLE


def pytest_runtest_setup() -> None:
    """Signals are taken on the main thread's own stack.

    Python handles them on an alternate stack where there is one, and pytest's fault handler sets one up. In a long run
    with every engine that stack was no longer there when a test sent Ctrl-C: the kernel then ends the process with a
    segmentation fault that nothing reports.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).sigaltstack(ctypes.byref(_NO_STACK), None)
