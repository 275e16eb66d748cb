"""Which layers of an architecture are windowed: llama.cpp's rules as data.

Read from the hyper-parameter loaders of llama.cpp (MIT, August 2026). A period p means that layer i is windowed when
`i % p < p - 1`, or with `dense_first` when `i % p != 0`; p = 0 means all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvtape.capacity.errors import ModelFileError
from kvtape.capacity.metadata import Metadata

__all__ = ["WindowPattern", "Windows", "windows_of"]

_KEY: Final = "attention.sliding_window_pattern"


@dataclass(frozen=True, slots=True)
class WindowPattern:
    """`period` None: the file has an array. `window`: used whatever the file says (a 0 in the file turns it off).

    `default_window`: used where the file has none. `reads_array`: an array in the file counts beside the period.
    `layers_only`: only models with this many layers have windows.
    """

    period: int | None = None
    dense_first: bool = False
    chunked: bool = False
    window: int | None = None
    default_window: int = 0
    reads_array: bool = False
    layers_only: int | None = None


_PATTERNS: Final = {
    "afmoe": WindowPattern(4),
    "cohere2": WindowPattern(4),
    "cohere2moe": WindowPattern(4, dense_first=True, reads_array=True),
    "exaone-moe": WindowPattern(4, default_window=128),
    "exaone4": WindowPattern(4, default_window=4096, layers_only=64),
    "gemma2": WindowPattern(2, default_window=4096),
    "gemma3": WindowPattern(6),
    "gemma3n": WindowPattern(5),
    "gemma4": WindowPattern(),
    "gpt-oss": WindowPattern(2),
    "laguna": WindowPattern(4, dense_first=True, reads_array=True),
    "lfm2": WindowPattern(0),
    "lfm2moe": WindowPattern(0),
    "llama4": WindowPattern(4, chunked=True, window=8192, default_window=8192),
    "mimo2": WindowPattern(),
    "olmo2": WindowPattern(4),
    "plamo3": WindowPattern(8),
    "smallthinker": WindowPattern(4, dense_first=True, window=4096),
    "step35": WindowPattern(),
}

_NOT_READ: Final = "llama.cpp does not read the window of this architecture"
_IGNORED: Final = {
    "llama": _NOT_READ,
    "phi3": "llama.cpp turns the window of phi3 off",
    "qwen2": _NOT_READ,
    "qwen2moe": _NOT_READ,
    "qwen3": _NOT_READ,
    "qwen3moe": _NOT_READ,
}


@dataclass(frozen=True, slots=True)
class Windows:
    """`flags`: windowed or not, layer by layer. `notes` say what was assumed or passed over."""

    flags: tuple[bool, ...]
    window: int
    chunked: bool = False
    notes: tuple[str, ...] = ()


def windows_of(meta: Metadata, n_layers: int) -> Windows:
    """Raises ModelFileError for an array that does not fit the model."""
    none = Windows((False,) * n_layers, 0)
    declared = meta.integer("attention.sliding_window", 0) if meta.has("attention.sliding_window") else None
    pattern = _PATTERNS.get(meta.arch)
    if pattern is None:
        return _unknown(meta, n_layers, declared) if declared else none
    if pattern.layers_only not in (None, n_layers):
        return none
    window = pattern.default_window if declared is None else declared
    if not window:
        return none
    if pattern.window is not None:
        window = pattern.window
    flags, notes = _flags(meta, pattern, n_layers)
    return Windows(flags, window, pattern.chunked, notes)


def _flags(meta: Metadata, pattern: WindowPattern, n_layers: int) -> tuple[tuple[bool, ...], tuple[str, ...]]:
    value = meta.get(_KEY)
    is_array = isinstance(value, list | tuple)
    if pattern.period is None or (is_array and pattern.reads_array):
        if not is_array:
            raise ModelFileError(f"{meta.source}: {meta.arch}.{_KEY} is {value!r}; this architecture needs an array")
        # Entries of prediction layers, behind the layers that run, do not count.
        n_entries = len(value) if len(value) == meta.integer("block_count") else n_layers
        return tuple(bool(entry) for entry in meta.per_layer(_KEY, n_entries)[:n_layers]), ()
    if is_array:
        note = f"the array {_KEY} is not read by llama.cpp for {meta.arch}; its period of {pattern.period} counts"
        return _periodic(pattern.period, pattern.dense_first, n_layers), (note,)
    period = pattern.period if value is None else meta.integer(_KEY)
    return _periodic(period, pattern.dense_first, n_layers), ()


def _periodic(period: int, dense_first: bool, n_layers: int) -> tuple[bool, ...]:
    if period == 0:
        return (True,) * n_layers
    return tuple(i % period != 0 if dense_first else i % period < period - 1 for i in range(n_layers))


def _unknown(meta: Metadata, n_layers: int, window: int) -> Windows:
    """An architecture that is not in the table and declares a window: never silently taken for full attention."""
    if meta.arch in _IGNORED:
        return Windows((False,) * n_layers, 0, notes=(f"{_IGNORED[meta.arch]}: every layer is full",))
    value = meta.get(_KEY)
    if isinstance(value, list | tuple):
        flags = tuple(bool(entry) for entry in meta.per_layer(_KEY, n_layers))
        return Windows(flags, window, notes=(f"assumed: {meta.arch} is unknown, its array says which are windowed",))
    if value:
        stride = meta.integer(_KEY)
        n_global = -(-n_layers // stride)
        flags = tuple(i >= n_global for i in range(n_layers))
        why = f"assumed: {meta.arch} is unknown; one layer in {stride} is global, {n_global} of {n_layers}"
        return Windows(flags, window, notes=(why,))
    why = f"assumed: {meta.arch} is unknown and declares a window of {window} without a pattern; every layer is full"
    return Windows((False,) * n_layers, 0, notes=(why,))
