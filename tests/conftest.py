"""What every test relies on."""

import signal

# Before any test module imports openvino itself: the backend's package takes its reporter out first.
from hypothesis import settings

import kvtape.backends.openvino  # noqa: F401

# How long one example takes says more about the machine than about the code; the timeout of a test still holds.
settings.register_profile("kvtape", deadline=None)
settings.load_profile("kvtape")

# A job in the background inherits that Ctrl-C is ignored, and would wait for the one that a test sends to itself.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
