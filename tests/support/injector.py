"""Faults put into a real backend's operation where the engine cannot be brought to fail by itself."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["Injector"]


class Injector:
    """Makes one operation of a real backend raise once; a seeded coin says whether the engine does its work before."""

    def __init__(self, backend: Any, seed: int) -> None:
        self._backend = backend
        self.after = random.Random(seed).random() < 0.5
        self.fired = 0

    def arm(self, operation: str, error: BaseException) -> None:
        """The next call of `operation` raises `error`; the ones after it are the backend's own again."""
        real = getattr(self._backend, operation)

        def fail(*args: Any, **kwargs: Any) -> Any:
            delattr(self._backend, operation)
            self.fired += 1
            if self.after:
                real(*args, **kwargs)
            raise error

        setattr(self._backend, operation, fail)
