"""Which model layers' attention counts, as text: `all`, `late`, `17-23`, `7+14+21`, `0-3+17`. Both ends are included.

`late` is a share of a model's depth, where attention to what a question needs was found (docs/policies.md).
"""

from __future__ import annotations

import re

from kvtape.planner.grammar import SpecError

__all__ = ["ALL", "LATE", "canonical_layers", "late_layers", "read_layers"]

ALL = "all"
LATE = "late"

_LATE_FROM, _LATE_TO, _LATE_OF = 16, 23, 30
"""Measured on a model of 30 layers: 16 to 22 (`kvtape eval --choose-layers`)."""


_PART = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")


def read_layers(text: str) -> tuple[int, ...] | None:
    """The layers, ascending; None for `all` and `late`, which no text can number. Raises SpecError for other text and
    for a layer named twice."""
    if text in (ALL, LATE):
        return None
    layers: list[int] = []
    for part in text.split("+"):
        match = _PART.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise SpecError(f"layers={text}: {part!r} is not understood; write all, late, 17-23, 7+14+21 or 0-3+17")
        layers += range(first, last + 1)
    if len(set(layers)) != len(layers):
        raise SpecError(f"layers={text}: a layer is named twice; name each once")
    return tuple(sorted(layers))


def canonical_layers(text: str) -> str:
    """The one text for these layers: ascending, neighbours written as a range. Raises SpecError."""
    layers = read_layers(text)
    if layers is None:
        return text
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return "+".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def late_layers(n_layers: int) -> tuple[int, ...]:
    """The `late` layers of a model with `n_layers` (at least 1): of 30, 16 to 22. Never none."""
    first = _LATE_FROM * n_layers // _LATE_OF
    return tuple(range(first, -(-_LATE_TO * n_layers // _LATE_OF)))
