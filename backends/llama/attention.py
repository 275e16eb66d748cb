"""Reading attention while llama.cpp computes: the soft-max nodes of its graph, seen through its evaluation callback.

Without flash attention every layer has a node `kq_soft_max-<layer>`: f32, in memory order `[n_heads, n_queries,
n_cells]`; its second source is the mask, 0 where a query sees a cell and -inf elsewhere. A model with learned sink
weights has them inside the soft-max, so there a query's weights add up to less than 1.

A callback that returns False where a node is done stops the graph, and `llama_decode` still returns 0 with wrong
logits; an exception in it counts as False. So nothing leaves the callback, and `collect` says afterwards what failed.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtape.backends.llama.native import library

__all__ = ["AttentionTap", "CellSums", "TapError"]

_NODE: Final = b"kq_soft_max-"
# struct ggml_tensor of the pinned version; `ggml_tensor_overhead` is its size and that of its header.
_NAME, _NAME_SIZE, _OVERHEAD, _F32 = 256, 64, 368, 0
_NAME_START: Final = int.from_bytes(_NODE[:8], "little")

Floats = npt.NDArray[np.float32]


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int32),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
    )


class TapError(Exception):
    """Attention could not be read; what was computed meanwhile may be wrong."""


class CellSums:
    """Attention that queries paid to each memory cell, in `layers`, by head.

    `heads[layer]` float64 `[n_heads, n_cells]`, zero past the cells seen; `n_queries[layer]` how many were counted.
    """

    def __init__(self, n_cells: int, layers: frozenset[int]) -> None:
        self.layers = layers
        self.heads: dict[int, npt.NDArray[np.float64]] = {}
        self.n_queries: dict[int, int] = {}
        self._n_cells = n_cells
        self._last_mask: Floats = np.zeros(0, np.float32)

    @property
    def n_seen(self) -> int:
        """Queries counted; the same in every layer between two decodes."""
        return next(iter(self.n_queries.values()), 0)

    @property
    def visible_cells(self) -> npt.NDArray[np.intp]:
        """Cells that the last query saw, itself included, ascending: those of its sequence."""
        return np.flatnonzero(self._last_mask == 0)

    def add(self, layer: int, weights: Floats, last_mask: Callable[[], Floats]) -> None:
        """Count `weights`, float32 `[n_heads, n_queries, n_cells]`; `last_mask` gives the last query's, `[n_cells]`."""
        n_heads, n_queries, n_cells = weights.shape
        if not self.n_queries or layer == next(iter(self.n_queries)):
            self._last_mask = last_mask()
        sums = self._of(layer, n_heads)
        sums[:, :n_cells] += weights[:, 0] if n_queries == 1 else weights.sum(axis=1)
        self.n_queries[layer] = self.n_queries.get(layer, 0) + n_queries

    def take_over(self, other: CellSums) -> None:
        """Count what `other`, of later queries, has counted too."""
        n_cells = len(other._last_mask)
        for layer, sums in other.heads.items():
            if other.n_queries.get(layer):
                self._of(layer, len(sums))[:, :n_cells] += sums[:, :n_cells]
                self.n_queries[layer] = self.n_queries.get(layer, 0) + other.n_queries[layer]
                self._last_mask = other._last_mask

    def reset(self) -> None:
        """Forget everything; the arrays are kept for what comes."""
        n_cells = len(self._last_mask)
        for sums in self.heads.values():
            sums[:, :n_cells] = 0
        self.n_queries.clear()
        self._last_mask = np.zeros(0, np.float32)

    def _of(self, layer: int, n_heads: int) -> npt.NDArray[np.float64]:
        if layer not in self.heads:
            self.heads[layer] = np.zeros((n_heads, self._n_cells), np.float64)
        return self.heads[layer]


class AttentionTap:
    """The evaluation callback of one context. It declines every node unless something is being collected."""

    def __init__(self) -> None:
        lib = library().llama_cpp
        overhead = lib._lib.ggml_tensor_overhead
        overhead.restype = ctypes.c_size_t
        if overhead() != _OVERHEAD:
            raise TapError(f"this llama.cpp has tensors of {overhead()} bytes, {_OVERHEAD} are understood")
        self.callback: Any = lib.ggml_backend_sched_eval_callback(self._see)
        self._sums: CellSums | None = None
        self._error: BaseException | None = None

    @contextmanager
    def collect(self, sums: CellSums) -> Iterator[None]:
        """Count into `sums` what every decode in the body computes."""
        self._sums = sums
        try:
            yield
        finally:
            self._sums = None
            self._error = None

    @contextmanager
    def watch(self, stop: Callable[[], None]) -> Iterator[Callable[[int], None]]:
        """Around one decode; gives a check to call with its number of tokens when it has succeeded.

        The check raises TapError when some node was missed or failed to be read. An interrupt from the keyboard would
        be lost if it were raised inside a callback: it calls `stop`, and is raised when the body is over.
        """
        sums = self._sums
        before = sums.n_seen if sums is not None else 0

        def check(n_tokens: int) -> None:
            if self._error is not None:
                raise TapError(f"attention could not be read: {self._error!r}") from self._error
            if sums is None:
                return
            counts = [sums.n_queries.get(layer, 0) for layer in sorted(sums.layers)]
            if set(counts) != {before + n_tokens}:
                raise TapError(f"attention of {before + n_tokens} queries, seen in each layer: {counts}")

        with _interrupt_at_the_end(stop):
            yield check

    def _see(self, address: int, ask: bool, _: Any) -> bool:
        if ask:
            # A thousand times a token; nearly always the answer is no.
            if self._sums is None or ctypes.c_uint64.from_address(address + _NAME).value != _NAME_START:
                return False
            try:
                return self._layer(address) is not None
            except BaseException as err:
                self._error = err
                return False
        try:
            layer = self._layer(address)
            if layer is not None and self._sums is not None:
                tensor = _Tensor.from_address(address)
                self._sums.add(layer, _weights(tensor), lambda: _last_mask(tensor))
        except BaseException as err:
            self._error = err
        return True

    def _layer(self, address: int) -> int | None:
        """The layer of a soft-max node that is wanted; None for any other node."""
        if self._sums is None:
            return None
        name = ctypes.string_at(address + _NAME, _NAME_SIZE).split(b"\0", 1)[0]
        number = name.removeprefix(_NODE)
        if number == name or not number.isdigit():
            return None
        layer = int(number)
        return layer if layer in self._sums.layers else None


def _weights(tensor: Any) -> Floats:
    """`[n_heads, n_queries, n_cells]`, a view of the engine's memory."""
    n_cells, n_queries, n_heads, n_streams = tensor.ne
    packed = (4, 4 * n_cells, 4 * n_cells * n_queries)
    if tensor.type != _F32 or n_streams != 1 or tuple(tensor.nb[:3]) != packed:
        raise TapError(f"soft-max of type {tensor.type}, shape {tuple(tensor.ne)}, strides {tuple(tensor.nb)}")
    return _floats(tensor.data, n_cells * n_queries * n_heads).reshape(n_heads, n_queries, n_cells)


def _last_mask(tensor: Any) -> Floats:
    """A copy of the mask of the last query, `[n_cells]`."""
    n_cells, n_queries = tensor.ne[:2]
    mask = _Tensor.from_address(tensor.src[1])
    if mask.type != _F32 or mask.ne[0] != n_cells or mask.ne[1] < n_queries or mask.nb[0] != 4:
        raise TapError(f"mask of type {mask.type}, shape {tuple(mask.ne)} for {n_cells} cells, {n_queries} queries")
    return _floats(mask.data + (n_queries - 1) * mask.nb[1], n_cells).copy()


def _floats(address: int, n: int) -> Floats:
    buffer: Any = (ctypes.c_float * n).from_address(address)
    return np.frombuffer(buffer, np.float32)


@contextmanager
def _interrupt_at_the_end(stop: Callable[[], None]) -> Iterator[None]:
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        stop()

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupted:
            raise KeyboardInterrupt
