"""From an OpenVINO model directory to the graph that sessions run on.

What users have is stateful already, but speaks of positions of a text: a 2-d attention mask, caches behind names, no
rows in sight. Here the caches are found behind each attention node, and attention is built anew over caches of our own
with a mask for each query and key. The rest of the graph stays: projections, norms, rotation, the feed-forward.

    rows after RoPE -> Concat(ReadValue, rows) -> repeat -> SDPA     becomes     state_of(rows) -> repeat -> SDPA
    attention_mask, lengths -> a causal mask ----------------^                   self_kq_mask -------------^

What is thrown away must have been the same: the mask is executed before (`ir_probe`) and must be causal over all rows,
heads must be repeated in plain groups, or the model is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from kvtape.backends.errors import UsageError
from kvtape.backends.openvino.graph import (
    TRANSPOSE,
    Cache,
    SessionGraph,
    beam_input,
    exact_scale,
    finished,
    last_line,
    repeat_heads,
    replace_value,
    state_of,
)
from kvtape.backends.openvino.ir_head import choose_rows
from kvtape.backends.openvino.ir_probe import check_mask
from kvtape.backends.openvino.ir_sources import EXPORT, CacheSource, cache_sources, text_inputs
from kvtape.backends.openvino.runtime import core
from kvtape.capacity.errors import ModelFileError
from kvtape.capacity.ir_files import ir_graph_file

__all__ = ["build_ir_graph"]


def build_ir_graph(folder: str | Path, n_ctx_train: int, *, queries: bool = False) -> SessionGraph:
    """`n_ctx_train` in tokens: so far back the model must see. `queries` as in `graph_source.build_graph`.

    Raises UsageError for a model that is no causal decoder of one kind of attention, naming what is in the way.
    """
    model = _read(Path(folder))
    name = Path(folder).name
    attention = [node for node in model.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention"]
    if not attention:
        raise UsageError(f"{name}: the graph has no ScaledDotProductAttention; {EXPORT}")
    inputs = text_inputs(model, name)
    sources = cache_sources(model, attention, name)
    check_mask(model, attention, [source.whole for pair in sources for source in pair], n_ctx_train, name)
    return _rebuilt(model, name, inputs, attention, sources, queries=queries)


def _read(folder: Path) -> Any:
    try:
        file = ir_graph_file(folder)
        return core().read_model(str(file))
    except ModelFileError as err:
        raise UsageError(str(err)) from None
    except RuntimeError as err:
        raise UsageError(
            f"{folder}: OpenVINO cannot read this model: {last_line(err)}; copy or export the folder again"
        ) from None


def _rebuilt(
    model: Any,
    name: str,
    inputs: dict[str, Any],
    attention: list[Any],
    sources: list[tuple[CacheSource, CacheSource]],
    *,
    queries: bool,
) -> SessionGraph:
    tokens, positions, chosen, mask, beam = _new_inputs()
    _feed(inputs["input_ids"], tokens)
    _feed(inputs["position_ids"], positions)
    keys, values, states, nodes = [], [], [], []
    for layer, (old, pair) in enumerate(zip(attention, sources, strict=True)):
        made = [state_of(f"cache_{w}_l{layer}", _upright(s), beam) for w, s in zip("kv", pair, strict=True)]
        nodes.append(_attention(old, made[0].cache, made[1].cache, mask, name))
        states += made
        keys.append(made[0].cache)
        values.append(made[1].cache)
    choose_rows(model, chosen, name)
    for sink in model.get_sinks():
        model.remove_sink(sink)
    for variable in model.get_variables():
        model.remove_variable(variable)
    model.add_parameters([tokens, positions, chosen, mask, beam])
    model.add_variables([state.variable for state in states])
    model.add_sinks([state.sink for state in states])
    for parameter in inputs.values():
        model.remove_parameter(parameter)
    try:
        model.validate_nodes_and_infer_types()
    except RuntimeError as err:
        raise UsageError(
            f"{name}: the graph uses its mask or its caches outside of attention, or computes in mixed types "
            f"({last_line(err)}); {EXPORT}"
        ) from None
    return finished(model, nodes, keys, values, queries=queries)


def _new_inputs() -> tuple[Any, Any, Any, Any, Any]:
    """What `runner` feeds, as it does to the graph of a GGUF."""

    def numbers(name: str) -> Any:
        parameter = op.parameter([1, 1, 1, -1], np.int32, name)
        parameter.output(0).get_tensor().set_names({name})
        return parameter

    mask = op.parameter([1, 1, -1, -1], np.float32, "self_kq_mask")
    mask.output(0).get_tensor().set_names({"self_kq_mask"})
    return numbers("inp_tokens"), numbers("inp_pos"), numbers("inp_out_ids"), mask, beam_input()


def _feed(old: Any, new: Any) -> None:
    flat = op.reshape(new, op.constant(np.array([1, -1])), special_zero=False)
    kind = old.get_output_element_type(0)
    replace_value(old.output(0), (op.convert(flat, kind.get_type_name()) if kind != ov.Type.i32 else flat).output(0))


def _upright(source: CacheSource) -> Any:
    """The new rows, heads before tokens, in f32."""
    axis = source.whole.get_attributes()["axis"] % 4
    rows = source.rows
    if axis == 1:
        rows = op.transpose(rows, op.constant(np.array(TRANSPOSE))).output(0)
    # A node of its own: the cache must not begin with a value that others read under another name.
    shape = rows.get_partial_shape()
    sizes = op.constant(np.array([0, shape[1].get_length(), -1, shape[3].get_length()]))
    if rows.get_element_type() != ov.Type.f32:
        rows = op.convert(rows, "f32").output(0)
    return op.reshape(rows, sizes, special_zero=True)


def _attention(old: Any, keys: Cache, values: Cache, mask: Any, name: str) -> Any:
    asked = old.input_value(0)
    if asked.get_element_type() != ov.Type.f32:
        asked = op.convert(asked, "f32").output(0)
    heads, width = (asked.get_partial_shape()[axis].get_length() for axis in (1, 3))
    scale = op.constant(_exact_scale(old, width, name))
    new = op.scaled_dot_product_attention(
        asked, repeat_heads(keys.whole, heads), repeat_heads(values.whole, heads), mask, scale, causal=False
    )
    result = new.output(0)
    if old.get_output_element_type(0) != ov.Type.f32:
        result = op.convert(result, old.get_output_element_type(0).get_type_name()).output(0)
    replace_value(old.output(0), result)
    return new


def _exact_scale(attention: Any, width: int, name: str) -> np.float32:
    if attention.get_input_size() > 5:
        raise UsageError(
            f"{name}: attention with learned sinks is not supported on OpenVINO; take --backend llama with a GGUF of it"
        )
    if attention.get_input_size() < 5:
        return exact_scale(None, width, name)
    node = attention.input_value(4).get_node()
    while node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Constant":
        raise UsageError(f"{name}: attention is scaled by what {node.get_type_name()} computes; not supported")
    return exact_scale(float(np.asarray(node.get_data()).reshape(())), width, name)
