"""One operation of a session at a time: whoever comes while one runs is refused, or waits for its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtape.backends.errors import SessionBusy

__all__ = ["Exclusive"]


class Exclusive:
    """A lock that knows its owner, so that a call from inside an operation is an error instead of a deadlock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @contextmanager
    def hold(self, operation: str, *, urge: Callable[[], None] | None = None) -> Iterator[None]:
        """Run the body alone. Raises SessionBusy; with `urge` calls it and waits for another thread instead."""
        if self._owner == threading.get_ident():
            raise SessionBusy(f"{operation}: called from inside another operation of this session (from choose?)")
        if not self._lock.acquire(blocking=False):
            if urge is None:
                raise SessionBusy(f"{operation}: another thread runs an operation of this session; wait or cancel it")
            urge()
            self._lock.acquire()
        self._owner = threading.get_ident()
        try:
            yield
        finally:
            self._owner = None
            self._lock.release()
