"""What an engine allocates for a context, whichever engine: settings in, one line per cache out, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from kvtape.capacity.errors import CapacityError
from kvtape.capacity.geometry import KVGeometry, LayerGroup

__all__ = [
    "Allocation",
    "CacheLine",
    "CachePart",
    "CacheSettings",
    "Caches",
    "Cells",
    "EngineRule",
    "largest_that_fits",
]

_SLOPE_STEPS: Final = 16


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """How a context is opened. Defaults are llama.cpp's; other engines ignore what they do not know.

    `slots`: sequences at once. `unified`: they share one cache of the whole context, else each has its part.
    `n_batch`, `n_ubatch`: tokens of a call and of a graph. `swa_full`: windowed layers keep the whole context.
    `snapshots`: rollback copies of each recurrent state.
    """

    slots: int = 1
    unified: bool = False
    n_batch: int = 2048
    n_ubatch: int = 512
    flash_attention: bool = True
    swa_full: bool = False
    snapshots: int = 0

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("n_batch", 1), ("n_ubatch", 1), ("snapshots", 0)):
            if getattr(self, name) < least:
                raise CapacityError(f"{name} is {getattr(self, name)}; the least is {least}")


@dataclass(frozen=True, slots=True)
class CachePart:
    """One cache: `layers` x `cells` x `streams` rows of keys and of values; sizes in bytes."""

    part: str
    layers: int
    cells: int
    streams: int
    k_bytes: int
    v_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.k_bytes + self.v_bytes


@dataclass(frozen=True, slots=True)
class Allocation:
    """Everything that is allocated for a context. `n_ctx` is the engine's own, `n_ctx_seq` what one sequence gets."""

    n_ctx: int
    n_ctx_seq: int
    parts: tuple[CachePart, ...]

    @property
    def total_bytes(self) -> int:
        return sum(part.total_bytes for part in self.parts)


class CacheLine(NamedTuple):
    """A group in its cache: bytes of one cell of all its layers together."""

    part: str
    group: LayerGroup
    k_cell_bytes: int
    v_cell_bytes: int


class Cells(NamedTuple):
    """For one context: the engine's own, that of a sequence, and (cells, streams) of each line."""

    n_ctx: int
    n_ctx_seq: int
    lines: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Caches:
    """The caches of a model in an engine with its settings, ready to be sized for any context.

    `growth`: what an engine may hold of a cache that grows, as a multiple of its rows; 1 where it is allocated at once.
    """

    lines: tuple[CacheLine, ...]
    cells: Callable[[int], Cells]
    growth: int = 1

    def total_bytes(self, n_ctx: int) -> int:
        """Bytes of a context of `n_ctx` tokens, all slots together, as asked of the engine; at least 1 is taken."""
        sized = self.cells(max(1, n_ctx)).lines
        return sum(
            (line.k_cell_bytes + line.v_cell_bytes) * cells * streams
            for line, (cells, streams) in zip(self.lines, sized, strict=True)
        )

    def peak_bytes(self, n_ctx: int) -> int:
        """The most that the engine may hold on the way to `n_ctx` tokens: what memory must have room for."""
        return self.growth * self.total_bytes(n_ctx)

    def allocate(self, n_ctx: int) -> Allocation:
        """As `total_bytes`, cache by cache. Raises CapacityError below 1 token."""
        if n_ctx < 1:
            raise CapacityError(f"a context of {n_ctx} tokens; the least is 1")
        sized = self.cells(n_ctx)
        found: dict[tuple[str, int, int], CachePart] = {}
        for line, (cells, streams) in zip(self.lines, sized.lines, strict=True):
            key = (line.part, cells, streams)
            old = found.get(key, CachePart(line.part, 0, cells, streams, 0, 0))
            rows = cells * streams
            k, v = old.k_bytes + rows * line.k_cell_bytes, old.v_bytes + rows * line.v_cell_bytes
            found[key] = CachePart(line.part, old.layers + line.group.count, cells, streams, k, v)
        return Allocation(sized.n_ctx, sized.n_ctx_seq, tuple(found.values()))


class EngineRule(Protocol):
    """How one version of an engine sizes its caches."""

    @property
    def name(self) -> str:
        """`engine@version`: the version is the first that the rule holds for."""

    @property
    def text(self) -> str:
        """The rule in words and formulas."""

    def context_step(self, settings: CacheSettings) -> int:
        """Contexts between two multiples of this are allocated as the upper one."""

    def caches(self, geometry: KVGeometry, settings: CacheSettings) -> Caches:
        """The model's caches under this rule. Raises CapacityError for what the engine would refuse."""


def largest_that_fits(size: Callable[[int], int], budget: int, limit: int, step: int) -> int:
    """The largest context in [0, `limit`] with `size(context) <= budget`; 0 when none fits.

    `size` must not fall, and be constant between multiples of `step`. The first guess goes back from the limit along
    the slope there, which is exact where all windows are full; what is left is halved.
    """
    at_limit = size(limit) if limit > 0 else 0
    if at_limit <= budget:
        return max(0, limit)
    low, high = 0, -(-limit // step)  # in steps: 0 counts as fitting, `high` does not fit
    near = max(0, high - _SLOPE_STEPS)
    rise = at_limit - size(near * step)
    guess = high - -(-(at_limit - budget) * (high - near) // rise) if rise else high // 2
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        if size(guess * step) > budget:
            high = guess
        elif guess + 1 == high or size((guess + 1) * step) > budget:
            return guess * step
        else:
            low = guess + 1
        guess = (low + high) // 2
    return low * step
