"""Between somebody's calls and the recorder: one thread at a time, and no failure of the recorder goes unsaid."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from kvtape.serve.taping.errors import CaptureFailed, ConcurrentUse

__all__ = ["Guard", "OnError"]

OnError = Literal["raise", "stop"]
"""`stop`: recording ends, one warning says so, the call goes on. `raise`: the call raises CaptureFailed as well."""


class Guard:
    """`on_stop` is told the first error; after it nothing is recorded any more."""

    def __init__(self, on_error: OnError, on_stop: Callable[[Exception], None]) -> None:
        self.error: Exception | None = None
        self._on_error, self._on_stop = on_error, on_stop
        self._lock = threading.RLock()
        self._ended = False

    @property
    def recording(self) -> bool:
        return self.error is None and not self._ended

    def end(self) -> None:
        """Nothing is recorded from here on; wrappers that are still held call through."""
        self._ended = True

    @contextmanager
    def call(self, what: str) -> Iterator[None]:
        """One call of the engine; calls of one thread nest. Raises ConcurrentUse."""
        if self._ended:
            yield
            return
        if not self._lock.acquire(blocking=False):
            raise ConcurrentUse(f"{what}: another thread is in the middle of a call of this engine; take turns")
        try:
            yield
        finally:
            self._lock.release()

    def note(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Do a step of recording. Raises CaptureFailed where that was asked for, and nothing else."""
        if not self.recording:
            return
        try:
            step(*args, **kwargs)
        except Exception as err:
            self.failed(err)

    def failed(self, err: Exception) -> None:
        """Recording ends here, because of `err`. Raises CaptureFailed where that was asked for."""
        self.error = err
        self._on_stop(err)
        text = f"kvtape stopped recording: {type(err).__name__}: {err}"
        if self._on_error == "raise":
            raise CaptureFailed(text) from err
        warnings.warn(f"{text}; the calls go on without it", RuntimeWarning, stacklevel=5)
