"""Does it fit? The context that a memory holds, and the refusal of what it does not: before anything is loaded.

A cache that does not fit is refused, never spilled to disk: the kernel overcommits, and an engine that was given
memory that is not there is killed in the middle of a session.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtape.backends.asked import CONTEXT_PADDING, effective_n_ctx
from kvtape.backends.errors import UsageError
from kvtape.capacity.allocation import largest_that_fits
from kvtape.capacity.errors import CapacityError
from kvtape.capacity.machine import free_memory, whole_memory
from kvtape.capacity.model import ModelFileError, ModelShape, read_model
from kvtape.capacity.resolve import MemoryBudget, resolve
from kvtape.capacity.sizes import parse_size, size_text
from kvtape.planner.specs import Option

__all__ = ["MEMORY_OPTION", "DoesNotFit", "Need", "check_weights", "fitted_context", "read_memory", "read_shape"]

MEMORY_OPTION: Final = Option(str, "off")
"""Engine option `memory`: `off`, `auto` (what the machine has free) or a size; the context is then what fits."""


class DoesNotFit(UsageError):
    """The memory does not hold what is asked; names what is needed, what there is, and what to ask for instead.

    `least`: bytes of the option `memory` that hold the smallest context; None where more of it would not help.
    """

    def __init__(self, message: str, least: int | None = None) -> None:
        super().__init__(message)
        self.least = least


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes. `cache` and `work` are of an effective context: rows, and what computing with them takes beside them."""

    weights: int
    cache: Callable[[int], int]
    work: Callable[[int], int]

    def at(self, n_ctx: int) -> int:
        """All but the weights."""
        return self.cache(n_ctx) + self.work(n_ctx)


def read_memory(text: str) -> int | None:
    """Bytes of the option `memory`; None for `off`. Raises UsageError for what is no size."""
    if text == "off":
        return None
    try:
        return free_memory() if text == "auto" else parse_size(text)
    except CapacityError as err:
        raise UsageError(f"memory={text}: {err}; or auto, or off") from None


def read_shape(path: str | Path) -> ModelShape:
    """What the header of a model file says. Raises UsageError for a file that is no model."""
    try:
        return read_model(path)
    except ModelFileError as err:
        raise UsageError(str(err)) from None


def check_weights(name: str, weights: int) -> None:
    """Raises DoesNotFit when not even the weights have room in what the machine has free."""
    free = _free()
    if weights > free:
        raise DoesNotFit(
            f"{name}: its weights need {size_text(weights)} and {size_text(free)} are free; use a smaller model or a "
            "stronger quantisation, or free memory"
        )


def fitted_context(asked: int, memory: int | None, need: Need, *, loaded: bool = False) -> int:
    """The effective context in tokens: `asked`, or with `memory` the largest up to it that fits.

    `loaded`: the weights are in memory that is not free any more; a mapped file's is, until somebody needs it. Raises
    DoesNotFit when the machine cannot hold it, or the memory not even the smallest context.
    """
    n_ctx = effective_n_ctx(asked)
    if memory is not None:
        n_ctx = _within(n_ctx, memory, need)
    free = _free()
    weights = 0 if loaded else need.weights
    if weights + need.at(n_ctx) > free:
        raise DoesNotFit(
            f"a context of {n_ctx} tokens needs {size_text(need.cache(n_ctx))} of cache and "
            f"{size_text(need.work(n_ctx))} to compute beside {size_text(weights)} of weights, and "
            f"{size_text(free)} are free; ask for a smaller n_ctx"
        )
    return n_ctx


def _free() -> int:
    """What the machine has free. Where the system does not say, all it has: no more than that can ever fit."""
    try:
        return free_memory()
    except CapacityError:
        return whole_memory()


def _within(n_ctx: int, memory: int, need: Need) -> int:
    budget = MemoryBudget(free=memory, weights=need.weights)
    found = resolve(n_ctx, lambda b: largest_that_fits(need.at, b, n_ctx, CONTEXT_PADDING), budget)
    if found.effective < CONTEXT_PADDING:
        least = int((need.weights + need.at(CONTEXT_PADDING)) / 0.9) + 1
        raise DoesNotFit(
            f"memory of {size_text(memory)} leaves {size_text(budget.for_cache)} beside the weights, and the smallest "
            f"context needs {size_text(need.at(CONTEXT_PADDING))}; give at least {size_text(least, up=True)}",
            least,
        )
    return int(found.effective)
