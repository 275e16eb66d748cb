"""From memory and wishes to the context that is served, with the reason when it is less than was asked.

Six numbers are kept apart: what the model was trained for, what was asked, what memory holds, what is served, what may
be hot in the cache, and what the planner can reach (hot, and what the cold store holds beside it).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Final, Self

from kvtape.capacity.errors import CapacityError

__all__ = ["DEFAULT_HEADROOM", "ClampReason", "MemoryBudget", "ResolvedContext", "ServedTokens", "resolve"]

DEFAULT_HEADROOM: Final = 0.1
"""Part of the memory that stays unused; also in the place of a value outside (0, 1)."""


class ClampReason(StrEnum):
    """Why less is served than was asked, or than the model could; the first that applies, in this order."""

    REQUEST_EXCEEDS_USER_LIMIT = "request_exceeds_user_limit"
    FREE_BELOW_RESERVE = "device_free_memory_below_reserve"
    REQUEST_EXCEEDS_MEMORY = "request_exceeds_memory_budget"
    MODEL_EXCEEDS_MEMORY = "model_context_exceeds_memory_budget"
    REQUEST_EXCEEDS_MODEL = "request_exceeds_model_context"


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes. `free` of the device, less `reserve`; the user's own `limit`, less what is `reserved` of it already.

    `weights` and `overhead` (compute buffers) come out of what is usable.
    """

    free: int
    reserve: int = 0
    limit: int | None = None
    reserved: int = 0
    weights: int = 0
    overhead: int = 0
    headroom: float = DEFAULT_HEADROOM

    @property
    def usable(self) -> int:
        """`max(0, min(free - reserve, limit - reserved) * (1 - headroom))`, whole bytes."""
        device = self.free - self.reserve
        return self._usable(device if self.limit is None else min(device, self.limit - self.reserved))

    @property
    def for_cache(self) -> int:
        """What is left of `usable` behind the weights and the overhead."""
        return max(0, self.usable - self.weights - self.overhead)

    def least_free(self, cache_bytes: int) -> int:
        """The smallest `free` that leaves `cache_bytes` for the cache, were the user's limit no bound."""
        whole = Fraction(self.weights + self.overhead + cache_bytes) / (1 - Fraction(self._headroom))
        free = max(0, math.ceil(whole) - 2)
        # A product with a float is rounded: looked for among the neighbours, not trusted.
        while self._usable(free) < self.weights + self.overhead + cache_bytes:
            free += 1
        return free + self.reserve

    @property
    def user_limit_for_cache(self) -> int | None:
        """As `for_cache`, of a device that has memory enough for the user's limit; None without a limit."""
        if self.limit is None:
            return None
        return max(0, self._usable(self.limit - self.reserved) - self.weights - self.overhead)

    @property
    def _headroom(self) -> float:
        return self.headroom if 0 < self.headroom < 1 else DEFAULT_HEADROOM

    def _usable(self, n_bytes: int) -> int:
        return max(0, int(n_bytes * (1 - self._headroom)))


class ServedTokens(int):
    """A served context. It remembers the `request` it came from, so that a resolved value never becomes the request.

    Resolving it again is resolving that request again: what was lowered once for want of memory rises with it.
    """

    request: int | None

    def __new__(cls, tokens: int, request: int | None) -> Self:
        made = super().__new__(cls, tokens)
        made.request = request
        return made


@dataclass(frozen=True, slots=True)
class ResolvedContext:
    """Tokens. `effective` is served; `hot` may stand in the cache, `planner` counts the cold store's tokens too."""

    model_max: int
    request: int | None
    memory_tokens: int
    effective: ServedTokens
    hot: int
    planner: int
    clamp_reason: ClampReason | None


def resolve(
    model_max: int,
    fit: Callable[[int], int],
    memory: MemoryBudget,
    request: int | ServedTokens | ResolvedContext | None = None,
    *,
    hot_limit: int | None = None,
    cold_tokens: int = 0,
) -> ResolvedContext:
    """`fit(bytes)` is the largest context that fits, at most what the model or the request allows.

    `hot_limit` is a policy's budget in tokens. A request only lowers. Raises CapacityError for a request below 1.
    """
    asked = _request(request)
    if asked is not None and asked < 1:
        raise CapacityError(f"a context of {asked} tokens was asked for; ask for 1 or more, or for none")
    memory_tokens = fit(memory.for_cache)
    served = min(model_max, memory_tokens) if asked is None else min(model_max, memory_tokens, asked)
    hot = served if hot_limit is None else min(served, hot_limit)
    return ResolvedContext(
        model_max=model_max,
        request=asked,
        memory_tokens=memory_tokens,
        effective=ServedTokens(served, asked),
        hot=hot,
        planner=hot + cold_tokens,
        clamp_reason=_reason(model_max, asked, memory_tokens, fit, memory),
    )


def _request(request: int | ServedTokens | ResolvedContext | None) -> int | None:
    if isinstance(request, ServedTokens | ResolvedContext):
        return request.request
    return request


def _reason(
    model_max: int, asked: int | None, memory_tokens: int, fit: Callable[[int], int], memory: MemoryBudget
) -> ClampReason | None:
    granted = memory.user_limit_for_cache
    wanted = model_max if asked is None else min(asked, model_max)
    if asked is not None and granted is not None and wanted > fit(granted):
        return ClampReason.REQUEST_EXCEEDS_USER_LIMIT
    if memory.free < memory.reserve:
        return ClampReason.FREE_BELOW_RESERVE
    if wanted > memory_tokens:
        return ClampReason.MODEL_EXCEEDS_MEMORY if asked is None else ClampReason.REQUEST_EXCEEDS_MEMORY
    return ClampReason.REQUEST_EXCEEDS_MODEL if asked is not None and asked > model_max else None
