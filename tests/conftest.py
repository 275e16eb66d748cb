"""What every test relies on."""

import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Generator

import pytest

# Before any test module imports openvino itself: the backend's package takes its reporter out first.
from hypothesis import settings

import kvtape.backends.openvino  # noqa: F401
from support.processor import refused_here

# No test reads or writes what the user has proven on this machine; processes that a test starts inherit it.
_proofs = tempfile.TemporaryDirectory(prefix="kvtape-proofs-")
os.environ["KVTAPE_PROOFS"] = f"{_proofs.name}/proofs.json"

# On a slow machine any command may take long enough to tell how far it is, beside what a test expects of stderr.
os.environ["KVTAPE_PROGRESS"] = "none"

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

    OpenVINO leaves an alternate signal stack on the thread that compiles a model. `backends.openvino` takes it back
    (`signal_stack`); tests that call OpenVINO by themselves do not, and a Ctrl-C after that ends the whole run.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).sigaltstack(ctypes.byref(_NO_STACK), None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What this processor cannot do, and kvtape refuses, is no failure of the test that asked for it."""
    report = yield
    refusal = refused_here(call.excinfo.value) if report.failed and call.excinfo is not None else None
    if refusal is not None:
        report.outcome, report.longrepr = "skipped", (str(item.path), (item.location[1] or 0) + 1, refusal)
    return report
