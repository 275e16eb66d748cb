"""Model directories with an edited graph: what sessions must refuse, or take as another model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

__all__ = [
    "attention_of",
    "edited_ir",
    "with_plain_attention",
    "with_shared_cache",
    "with_tokens_first",
    "with_window",
    "without_beam",
]


def edited_ir(source: Path, folder: Path, edit: Callable[[Any], None]) -> Path:
    """A copy of `source` in `folder` whose graph went through `edit`."""
    folder.mkdir()
    for file in sorted(source.iterdir()):
        if not file.name.startswith("openvino_model"):
            shutil.copy(file, folder)
    model = ov.Core().read_model(str(source / "openvino_model.xml"))
    edit(model)
    model.validate_nodes_and_infer_types()
    ov.save_model(model, str(folder / "openvino_model.xml"), compress_to_fp16=False)
    return folder


def attention_of(model: Any) -> list[Any]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention"]


def with_window(window: int) -> Callable[[Any], None]:
    """Hide rows that are `window` positions back or more."""

    def edit(model: Any) -> None:
        positions = next(p for p in model.get_parameters() if "position_ids" in p.output(0).get_names())
        for node in attention_of(model):
            mask = node.input_value(3)
            length = op.gather(op.shape_of(mask), op.constant(np.int64(3)), op.constant(np.int64(0)))
            keys = op.range(op.constant(np.int64(0)), length, op.constant(np.int64(1)), "i64")
            queries = op.unsqueeze(positions, op.constant(np.array([1, 3])))
            behind = op.less_equal(keys, op.subtract(queries, op.constant(np.int64(window))))
            hidden = op.select(behind, op.constant(np.float32(-1e9)), op.constant(np.float32(0)))
            node.input(3).replace_source_output(op.add(mask, hidden).output(0))

    return edit


def with_plain_attention(model: Any) -> None:
    """Attention as products and a softmax: what old exports have."""
    for node in attention_of(model):
        query, key, value, mask = node.input_values()[:4]
        width = query.get_partial_shape()[3].get_length()
        scores = op.multiply(op.matmul(query, key, False, True), op.constant(np.float32(width**-0.5)))
        out = op.matmul(op.softmax(op.add(scores, mask), -1), value, False, False)
        for target in list(node.output(0).get_target_inputs()):
            target.replace_source_output(out.output(0))


def without_beam(model: Any) -> None:
    """Caches that are read as they are, for one sequence only."""
    beam = next(p for p in model.get_parameters() if "beam_idx" in p.output(0).get_names())
    for target in list(beam.output(0).get_target_inputs()):
        gather = target.get_node()
        for user in list(gather.output(0).get_target_inputs()):
            user.replace_source_output(gather.input_value(0))
    model.remove_parameter(beam)


def with_tokens_first(model: Any) -> None:
    """Caches `[batch, tokens, heads, size]`, turned round for attention: how some exporters keep them."""
    turned = op.constant(np.array([0, 2, 1, 3]))
    variables, sinks = [], []
    for concat in [_cache_of(node, port) for node in attention_of(model) for port in (1, 2)]:
        gather, rows = concat.input_value(0).get_node(), concat.input_value(1)
        shape = rows.get_partial_shape()
        heads, width = shape[1].get_length(), shape[3].get_length()
        info = ov.op.util.VariableInfo()
        info.variable_id = gather.input_value(0).get_node().get_attributes()["variable_id"]
        info.data_type, info.data_shape = ov.Type.f32, ov.PartialShape([-1, -1, heads, width])
        variable = ov.op.util.Variable(info)
        past = op.gather(
            ov.op.read_value(op.constant(np.zeros((1, 0, heads, width), np.float32)), variable),
            gather.input_value(1),
            op.constant(np.int64(0)),
        )
        whole = op.concat([past, op.transpose(rows, turned)], 1)
        for old, new in ((concat, whole), (gather, past)):
            for target in list(old.output(0).get_target_inputs()):
                if target.get_node().get_type_name() != "Assign" and target.get_node() is not concat:
                    target.replace_source_output(op.transpose(new, turned).output(0))
        variables.append(variable)
        sinks.append(ov.op.assign(whole, variable))
    for sink in model.get_sinks():
        model.remove_sink(sink)
    for variable in model.get_variables():
        model.remove_variable(variable)
    model.add_variables(variables)
    model.add_sinks(sinks)


def with_shared_cache(model: Any) -> None:
    """The last layer attends to the values of the first."""
    first, *_, last = attention_of(model)
    last.input(2).replace_source_output(first.input_value(2))


def _cache_of(attention: Any, port: int) -> Any:
    node = attention.input_value(port).get_node()
    while node.get_type_name() != "Concat":
        node = node.input_value(0).get_node()
    return node
