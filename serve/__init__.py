"""A server whose sessions are on tape, and a tape for processes that serve already."""

from kvtape.serve.taping.capture import capture

__all__ = ["capture"]
