"""Values that a graph keeps as constants: plain, compressed to f16, or as integer steps with a scale for each group.

    step u8, u4 -> (- zero point) -> * scale f16 -> reshape -> f32

Groups of 32 steps around 128 are what llama.cpp calls Q8_0 and are kept as that, byte for byte; everything else is
computed here in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtape.backends.reference.errors import ModelUnsupported
from kvtape.capacity.errors import ModelFileError
from kvtape.capacity.ir_graph import IrGraph, IrNode

__all__ = ["behind_converts", "is_static", "matrix", "vector"]

F32 = npt.NDArray[np.float32]

_Q8_GROUP: Final = 32
_Q8_ZERO: Final = 128
_VARYING: Final = frozenset({"Parameter", "ReadValue", "ShapeOf"})
_ARITHMETIC: Final[Mapping[str, Callable[[F32, F32], F32]]] = {
    "Add": np.add,
    "Divide": np.divide,
    "Multiply": np.multiply,
    "Subtract": np.subtract,
}


def behind_converts(node: IrNode) -> IrNode:
    """What a value is before it is converted to other types of numbers."""
    while node.kind == "Convert":
        node = node.inputs[0].node
    return node


def is_static(node: IrNode) -> bool:
    """Is it made from constants alone? Only chains as short as those of a compressed weight are followed."""
    waiting, steps = [node], 0
    while waiting:
        one = waiting.pop()
        steps += 1
        if one.kind in _VARYING or steps > 16:
            return False
        if one.kind != "Const" and not one.inputs:
            return False
        waiting += [wire.node for wire in one.inputs]
    return True


def vector(graph: IrGraph, node: IrNode) -> F32:
    """The value of a static node in float32.

    Raises ModelUnsupported for an operation that no weight is made with, or an element type that is not known.
    """
    if node.kind == "Const":
        try:
            return np.asarray(graph.constant(node), np.float32)
        except ModelFileError as err:
            raise ModelUnsupported(str(err)) from None
    if node.kind == "Convert":
        return vector(graph, node.inputs[0].node)
    if node.kind in _ARITHMETIC:
        left, right = (vector(graph, wire.node) for wire in node.inputs)
        return _ARITHMETIC[node.kind](left, right)
    if node.kind == "Reshape":
        sizes = [int(n) for n in graph.constant(node.inputs[1].node)]
        values = vector(graph, node.inputs[0].node)
        kept = node.data.get("special_zero") == "true"
        return values.reshape([values.shape[i] if kept and n == 0 else n for i, n in enumerate(sizes)])
    if node.kind == "Transpose":
        return vector(graph, node.inputs[0].node).transpose([int(n) for n in graph.constant(node.inputs[1].node)])
    raise ModelUnsupported(f"{graph.file}: weights made with {node.kind} ({node.name}); the reference cannot read it")


def matrix(graph: IrGraph, node: IrNode, *, transposed: bool) -> tuple[Any, npt.NDArray[Any], int]:
    """GGML storage type, rows `[n_out, ...]` and the length of an input, of a static matrix.

    `transposed`: the graph has `[n_in, n_out]`.
    """
    import gguf

    kinds = gguf.GGMLQuantizationType
    if not transposed:
        steps = _q8_steps(graph, node)
        if steps is not None:
            return kinds.Q8_0, _q8_blocks(*steps), int(steps[0].shape[1] * _Q8_GROUP)
        plain = behind_converts(node)
        if plain.kind == "Const" and plain.data.get("element_type") in ("f16", "f32"):
            values = graph.constant(plain)
            return (kinds.F16 if values.dtype == np.float16 else kinds.F32), values, int(values.shape[1])
    whole = vector(graph, node)
    if whole.ndim != 2:
        raise ModelUnsupported(f"{graph.file}: {node.name} is no matrix; give the GGUF of the model")
    rows = np.ascontiguousarray(whole.T if transposed else whole)
    return kinds.F32, rows, int(rows.shape[1])


def _q8_steps(graph: IrGraph, node: IrNode) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
    """Steps u8 `[n_out, groups, 32]` and scales f16 `[n_out, groups, 1]`, where the matrix is nothing but that."""
    while node.kind in ("Convert", "Reshape"):
        node = node.inputs[0].node
    if node.kind != "Multiply" or node.inputs[0].node.kind != "Subtract" or node.inputs[1].node.kind != "Const":
        return None
    scales = graph.constant(node.inputs[1].node)
    steps, zero = (behind_converts(wire.node) for wire in node.inputs[0].node.inputs)
    if steps.kind != "Const" or zero.kind != "Const" or scales.dtype != np.float16:
        return None
    if steps.data.get("element_type") != "u8":
        return None
    values, zeros = graph.constant(steps), graph.constant(zero)
    if values.dtype != np.uint8 or values.ndim != 3 or values.shape[2] != _Q8_GROUP or (zeros != _Q8_ZERO).any():
        return None
    return (values, scales) if scales.shape == (*values.shape[:2], 1) else None


def _q8_blocks(steps: npt.NDArray[Any], scales: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """A scale and 32 signed steps, one group behind the other."""
    signed = (steps.astype(np.int16) - _Q8_ZERO).astype(np.int8).view(np.uint8)
    blocks = np.concatenate([np.ascontiguousarray(scales).view(np.uint8), signed], axis=2)
    return np.ascontiguousarray(blocks.reshape(len(steps), -1))
