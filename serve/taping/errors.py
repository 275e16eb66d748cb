"""What capturing refuses, and how it fails."""

from __future__ import annotations

from kvtape.backends.errors import KvtapeError, UsageError

__all__ = ["CaptureFailed", "CaptureRefused", "ConcurrentUse", "LostTrack"]


class CaptureRefused(UsageError):
    """This object cannot be captured, or is being captured already; nothing was touched."""


class ConcurrentUse(UsageError):
    """A second thread called an engine that was in the middle of a call; the engine was not asked."""


class CaptureFailed(KvtapeError):
    """Recording failed, and `on_error="raise"` was asked for; the engine had done its work."""


class LostTrack(Exception):
    """The engine did what the events of one session cannot say, or holds other rows than they say."""
