"""Engines that are loaded once for many sessions, each of which may close what it was lent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from kvtape.backends.lent import LentEngine
from kvtape.backends.protocol import Engine
from kvtape.backends.registry import open_engine

__all__ = ["LentEngines"]

_Open = Callable[[str, Path, Mapping[str, str]], Engine]


class LentEngines:
    """`open` loads a file on an engine the first time and lends the same one after that; the end closes them all."""

    def __init__(self, opener: _Open = open_engine) -> None:
        self._opener = opener
        self._loaded: dict[tuple[str, Path, tuple[tuple[str, str], ...]], Engine] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        while self._loaded:
            self._loaded.popitem()[1].close()

    def open(self, name: str, path: Path, options: Mapping[str, str]) -> Engine:
        """As `registry.open_engine`."""
        key = (name, path, tuple(sorted(options.items())))
        if key not in self._loaded:
            self._loaded[key] = self._opener(name, path, options)
        return LentEngine(self._loaded[key])
