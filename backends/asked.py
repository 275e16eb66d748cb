"""What a session asks for, checked alike on every engine: sizes, the effective context, engine options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

import numpy as np

from kvtape.backends.errors import InputRejected, UsageError
from kvtape.backends.protocol import FlashAttention, SessionConfig
from kvtape.planner.specs import Option, Spec, SpecError, parse_options

__all__ = ["CONTEXT_PADDING", "check_layers", "check_sizes", "effective_n_ctx", "read_options"]

CONTEXT_PADDING: Final = 256
"""llama.cpp rounds a context up to a multiple of this many tokens; every engine does, so one log has one meaning."""

_BOUNDS: Final = {
    "n_ctx": (1, 2**24),
    "chunk": (1, 2**16),
    "threads": (1, 512),
    "cold_budget_tokens": (0, 2**31 - 1),
    "cold_budget_bytes": (0, 2**63 - 1),
}


def check_sizes(config: SessionConfig) -> None:
    """Raises UsageError naming the size and its bounds, in tokens, threads or bytes, or what flash attention may be."""
    for name, (least, most) in _BOUNDS.items():
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise UsageError(f"{name} is {value!r}; it must be a whole number in [{least}, {most}]")
    flash: object = config.flash_attention
    if flash not in get_args(FlashAttention):
        raise UsageError(f"flash_attention is {flash!r}; it must be one of {', '.join(get_args(FlashAttention))}")
    if config.cold_budget_bytes and not config.cold_budget_tokens:
        raise UsageError("cold_budget_bytes without cold_budget_tokens: a cold store needs a budget in tokens")


def effective_n_ctx(asked: int) -> int:
    """The context in tokens: `asked` made even, then padded."""
    return -(-(asked + asked % 2) // CONTEXT_PADDING) * CONTEXT_PADDING


def read_options(engine: str, given: Mapping[str, str], known: Mapping[str, Option]) -> dict[str, Any]:
    """Engine options with defaults filled in. Raises UsageError that lists what is known."""
    try:
        return dict(parse_options(Spec(engine, tuple(given.items())), known))
    except SpecError as err:
        raise UsageError(str(err)) from None


def check_layers(layers: Sequence[int] | None, n_layers: int) -> list[int]:
    """`layers` ascending; None is all of `n_layers`. Raises InputRejected for none, one twice, or one there is not."""
    if layers is None:
        return list(range(n_layers))
    if not len(layers) or len(set(layers)) != len(layers):
        raise InputRejected(f"layers {list(layers)} are not one or more different ones")
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or not 0 <= layer < n_layers:
            raise InputRejected(f"layer {layer!r} is outside [0, {n_layers})")
    return sorted(int(layer) for layer in layers)
