"""Which model layers' attention counts, as text: `all`, `17-23`, `7+14+21`, `0-3+17`. Both ends are included."""

from __future__ import annotations

import re

from kvtape.planner.grammar import SpecError

__all__ = ["canonical_layers", "read_layers"]

_PART = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")


def read_layers(text: str) -> tuple[int, ...] | None:
    """The layers, ascending; None for `all`. Raises SpecError for other text and for a layer named twice."""
    if text == "all":
        return None
    layers: list[int] = []
    for part in text.split("+"):
        match = _PART.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise SpecError(f"layers={text}: {part!r} is not understood; write all, 17-23, 7+14+21 or 0-3+17")
        layers += range(first, last + 1)
    if len(set(layers)) != len(layers):
        raise SpecError(f"layers={text}: a layer is named twice")
    return tuple(sorted(layers))


def canonical_layers(text: str) -> str:
    """The one text for these layers: ascending, neighbours written as a range. Raises SpecError."""
    layers = read_layers(text)
    if layers is None:
        return "all"
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return "+".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
