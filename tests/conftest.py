"""What every test relies on."""

# Before any test module imports openvino itself: the backend's package takes its reporter out first.
import kvtape.backends.openvino  # noqa: F401
