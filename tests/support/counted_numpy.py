"""numpy with an account of what it sorts: for tests that something is not sorted again."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["CountedNumpy"]


class CountedNumpy:
    """To be put in a module's `np`. `sizes`: how many elements each sort had."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if name not in ("argsort", "lexsort", "sort"):
            return found

        def counted(values: Any, **rest: Any) -> Any:
            self.sizes.append(len(values[0]) if name == "lexsort" else len(values))
            return found(values, **rest)

        return counted
