"""Which rows go through the head's matrix of an OpenVINO model directory: those whose logits are wanted."""

from __future__ import annotations

from typing import Any

import numpy as np
from openvino import opset13 as op

from kvtape.backends.errors import UsageError
from kvtape.backends.openvino.ir_sources import EXPORT

__all__ = ["choose_rows"]

_SCALING = frozenset({"Add", "Convert", "Divide", "Multiply", "Tanh"})
"""What may stand between the product with the head's matrix and the logits: each of it is done row by row."""


def choose_rows(model: Any, chosen: Any, name: str) -> None:
    """Only the rows of `inp_out_ids` go through the head's matrix; where that is not found, all rows do."""
    result = model.get_results()[0]
    logits = result.input_value(0)
    if len(model.get_results()) != 1 or logits.get_partial_shape().rank.get_length() != 3:
        raise UsageError(f"{name}: the result is {logits.get_partial_shape()}, not one of logits; {EXPORT}")
    which = op.reshape(chosen, op.constant(np.array([-1])), special_zero=False)
    product = _product(logits)
    if product is None:
        few = op.gather(logits, which, op.constant(np.int64(1)))
        result.input(0).replace_source_output(op.unsqueeze(_as_f32(few), op.constant(np.int64(0))).output(0))
        return
    port = product.input(0)
    port.replace_source_output(op.gather(port.get_source_output(), which, op.constant(np.int64(1))).output(0))
    result.input(0).replace_source_output(op.unsqueeze(_as_f32(logits), op.constant(np.int64(0))).output(0))


def _as_f32(value: Any) -> Any:
    return op.convert(value, "f32")


def _product(logits: Any) -> Any:
    """The multiplication of hidden rows with the head's matrix, None where something else makes the logits.

    Between the two only what is done to each row alone, by constants.
    """
    node = logits.get_node()
    while node.get_type_name() in _SCALING:
        varying = [value for value in node.input_values() if not _is_constant(value.get_node())]
        if len(varying) != 1:
            return None
        node = varying[0].get_node()
    if node.get_type_name() != "MatMul" or not _is_constant(node.input_value(1).get_node()):
        return None
    attributes = node.get_attributes()
    shape = node.input_value(0).get_partial_shape()
    return node if not attributes["transpose_a"] and shape.rank.get_length() == 3 else None


def _is_constant(node: Any) -> bool:
    """Does it depend on constants alone?"""
    waiting, seen = [node], set()
    while waiting:
        one = waiting.pop()
        if one.get_type_name() in ("Parameter", "ReadValue"):
            return False
        seen.add(one.get_friendly_name())
        waiting += [v.get_node() for v in one.input_values() if v.get_node().get_friendly_name() not in seen]
    return True
