"""Engines by spec, `NAME[@VERSION]`: `llama.cpp`, `llama.cpp@b9849`, `openvino`, `openvino-cb`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from kvtape.capacity.allocation import Allocation, CacheSettings, EngineRule, largest_that_fits
from kvtape.capacity.errors import CapacityError, nearest
from kvtape.capacity.geometry import KVGeometry
from kvtape.capacity.llama_rules import llama_rule
from kvtape.capacity.openvino_rules import PagedRule, StatefulRule

__all__ = ["ENGINES", "Sizing", "engine_rule"]

ENGINES: Final = ("llama.cpp", "openvino", "openvino-cb")
"""`openvino` is the stateful cache of one request, `openvino-cb` the pool of continuous batching."""

_BUILD = re.compile(r"b?([0-9]{1,9})")


def engine_rule(spec: str) -> EngineRule:
    """The rule of an engine; without a version the newest. Raises CapacityError that lists what is known."""
    name, at, version = spec.partition("@")
    if name not in ENGINES or (at and not version):
        hint = nearest(name, ENGINES)
        raise CapacityError(
            f"engine {spec!r} is unknown{hint} choose from {', '.join(ENGINES)}, with @VERSION if need be"
        )
    if name == "llama.cpp":
        if not version:
            return llama_rule()
        build = _BUILD.fullmatch(version)
        if build is None:
            raise CapacityError(f"engine {spec!r}: a build of llama.cpp is a number, as in llama.cpp@b9849")
        return llama_rule(int(build[1]))
    # One rule each, measured with 2026.4; another version is taken to be the same and is not named.
    return StatefulRule() if name == "openvino" else PagedRule()


class Sizing:
    """A model's layers in an engine with settings: bytes of a context, and the context that bytes allow."""

    def __init__(self, geometry: KVGeometry, rule: EngineRule, settings: CacheSettings) -> None:
        """Raises CapacityError for what the engine would refuse."""
        self.geometry = geometry
        self.rule = rule
        self.settings = settings
        self._caches = rule.caches(geometry, settings)

    def allocate(self, n_ctx: int) -> Allocation:
        """What a context of `n_ctx` tokens (all slots together) takes."""
        return self._caches.allocate(n_ctx)

    def total_bytes(self, n_ctx: int) -> int:
        """The same in one number."""
        return self._caches.total_bytes(n_ctx)

    def peak_bytes(self, n_ctx: int) -> int:
        """What memory must have room for; more than `total_bytes` where an engine's buffers grow by doubling."""
        return self._caches.peak_bytes(n_ctx)

    @property
    def smallest(self) -> int:
        """Tokens of the smallest context that `fit` knows."""
        return self.rule.context_step(self.settings)

    def fit(self, limit: int) -> Callable[[int], int]:
        """From bytes to the largest context that they have room for, at most `limit` tokens; for `resolve`."""
        return lambda budget: largest_that_fits(self._caches.peak_bytes, budget, limit, self.smallest)
