"""What every test relies on."""

# Before any test module imports openvino itself: the backend's package takes its reporter out first.
from hypothesis import settings

import kvtape.backends.openvino  # noqa: F401

# How long one example takes says more about the machine than about the code; the timeout of a test still holds.
settings.register_profile("kvtape", deadline=None)
settings.load_profile("kvtape")
