"""Listening in on objects that take no attributes: their class is wrapped while one of its objects is captured.

Objects of the class that nobody captures are called through, and the class is what it was once the last capture ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvtape.serve.taping.patching import Patches

__all__ = ["Listener", "tapped"]

Listener = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Gets a method bound to its object, and the call's arguments; gives what the call gives."""

_lock = threading.Lock()
_heard: dict[int, Mapping[str, Listener]] = {}
_patched: dict[type, tuple[Patches, set[int]]] = {}


@contextmanager
def tapped(thing: Any, listeners: Mapping[str, Listener]) -> Iterator[None]:
    """While the block runs, these methods of `thing` go through their listeners. One tap at a time for one object."""
    kind, key = type(thing), id(thing)
    with _lock:
        if kind not in _patched:
            _patched[kind] = (Patches(), set())
            for name in listeners:
                _patched[kind][0].put(kind, name, _forward(name))
        _patched[kind][1].add(key)
        _heard[key] = listeners
    try:
        yield
    finally:
        with _lock:
            patches, tapping = _patched[kind]
            tapping.discard(key)
            del _heard[key]
            if not tapping:
                patches.undo()
                del _patched[kind]


def _forward(name: str) -> Callable[[Any], Callable[..., Any]]:
    def make(original: Any) -> Callable[..., Any]:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            listener = _heard.get(id(self), {}).get(name)
            if listener is None:
                return original(self, *args, **kwargs)
            return listener(lambda *a, **k: original(self, *a, **k), args, kwargs)

        return forward

    return make
