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

import math
from dataclasses import dataclass
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
    finished,
    last_line,
    repeat_heads,
    replace_value,
    state_of,
)
from kvtape.backends.openvino.ir_probe import check_mask
from kvtape.backends.openvino.runtime import core
from kvtape.capacity.errors import ModelFileError
from kvtape.capacity.ir_files import ir_graph_file

__all__ = ["build_ir_graph"]

_INPUTS = ("input_ids", "attention_mask", "position_ids", "beam_idx")
_EXPORT = "export it anew with `optimum-cli export openvino --task text-generation-with-past`"
_BETWEEN = frozenset({"Broadcast", "Convert", "Reshape", "Tile", "Transpose", "Unsqueeze"})
"""What may stand between a cache and its attention: an order of axes, and the repetition of heads in plain groups."""

_REPEATED = (("Unsqueeze", "Broadcast", "Reshape"), ("Unsqueeze", "Tile", "Reshape"))

_SCALING = frozenset({"Add", "Convert", "Divide", "Multiply", "Tanh"})
"""What may stand between the product with the head's matrix and the logits: each of it is done row by row."""


@dataclass(frozen=True, slots=True)
class _Source:
    """One cache as the model has it: the concatenation, its new rows `[1, G, T, D]` (or `[1, T, G, D]`), its state."""

    whole: Any
    rows: Any
    state: str


def build_ir_graph(folder: str | Path, n_ctx_train: int, *, queries: bool = False) -> SessionGraph:
    """`n_ctx_train` in tokens: so far back the model must see. `queries` as in `graph_source.build_graph`.

    Raises UsageError for a model that is no causal decoder of one kind of attention, naming what is in the way.
    """
    model = _read(Path(folder))
    name = Path(folder).name
    attention = [node for node in model.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention"]
    if not attention:
        raise UsageError(f"{name}: the graph has no ScaledDotProductAttention; {_EXPORT}")
    inputs = _inputs(model, name)
    sources = [(_source(node, 1, name), _source(node, 2, name)) for node in attention]
    _check_states(model, sources, name)
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


def _inputs(model: Any, name: str) -> dict[str, Any]:
    """The parameters by name. Raises UsageError for one that is missing, or one too many."""
    found: dict[str, Any] = {}
    for node in model.get_parameters():
        names = node.output(0).get_names()
        found[next((n for n in _INPUTS if n in names), ", ".join(sorted(names)) or node.get_friendly_name())] = node
    missing = [n for n in ("input_ids", "position_ids", "beam_idx") if n not in found]
    if missing:
        raise UsageError(f"{name}: the graph has no input {', '.join(missing)}; {_EXPORT}")
    more = sorted(set(found) - set(_INPUTS))
    if more:
        raise UsageError(f"{name}: the graph has the inputs {', '.join(more)}, which sessions on text cannot fill")
    for n, rank in (("input_ids", 2), ("position_ids", 2)):
        shape = found[n].get_output_partial_shape(0)
        if shape.rank.is_dynamic or len(shape) != rank:
            raise UsageError(f"{name}: the input {n} is {shape}, not [batch, tokens]; sessions cannot fill it")
        if any(size.is_static for size in shape):
            raise UsageError(f"{name}: the input {n} has the fixed shape {shape}; {_EXPORT}, with dynamic shapes")
    return found


def _source(attention: Any, port: int, name: str) -> _Source:
    """Walk from an attention node's keys or values back to the cache."""
    what = "keys" if port == 1 else "values"
    node = attention.input_value(port).get_node()
    between: list[Any] = []
    while node.get_type_name() in _BETWEEN:
        between.insert(0, node)
        node = node.input_value(0).get_node()
    past = node.input_value(0).get_node() if node.get_type_name() == "Concat" and node.get_input_size() == 2 else None
    while past is not None and past.get_type_name() in ("Gather", "Convert"):
        past = past.input_value(0).get_node()
    if past is None or past.get_type_name() != "ReadValue":
        raise UsageError(
            f"{name}: the {what} of {attention.get_friendly_name()} do not come from a cache in a state (there is "
            f"{node.get_type_name()}); {_EXPORT}, stateful"
        )
    if not _in_plain_groups(between, node.get_attributes()["axis"] % 4):
        way = ", ".join(step.get_type_name() for step in between) or "nothing"
        raise UsageError(
            f"{name}: between the cache and attention the {what} go through {way}; this layout is not known"
        )
    return _Source(node, node.input_value(1), str(past.get_attributes()["variable_id"]))


def _in_plain_groups(between: list[Any], axis: int) -> bool:
    """Does query head h read cached head h // (heads / kv_heads)?

    Heads are made one axis more right behind their own, repeated there, and both axes become one again.
    """
    steps = [node for node in between if node.get_type_name() != "Convert"]
    if axis == 1:  # tokens before heads
        if not steps or steps[0].get_type_name() != "Transpose" or _numbers(steps.pop(0)) != list(TRANSPOSE):
            return False
    elif axis != 2:
        return False
    if not steps:
        return True
    return tuple(node.get_type_name() for node in steps) in _REPEATED and _numbers(steps[0]) == [2]


def _numbers(node: Any) -> list[int]:
    """The second input of a node, where it is constant."""
    constant = node.input_value(1).get_node()
    if constant.get_type_name() != "Constant":
        return []
    return [int(n) for n in np.asarray(constant.get_data()).ravel()]


def _check_states(model: Any, sources: list[tuple[_Source, _Source]], name: str) -> None:
    used = [source.state for pair in sources for source in pair]
    known = {str(variable.info.variable_id) for variable in model.get_variables()}
    if len(set(used)) != len(used):
        raise UsageError(f"{name}: layers share a cache, which sessions cannot keep")
    if set(used) != known:
        others = ", ".join(sorted(known - set(used))[:4])
        raise UsageError(f"{name}: states beside keys and values ({others}); sessions cannot cut those by tokens")


def _rebuilt(
    model: Any,
    name: str,
    inputs: dict[str, Any],
    attention: list[Any],
    sources: list[tuple[_Source, _Source]],
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
    _choose_rows(model, chosen, name)
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
            f"({last_line(err)}); {_EXPORT}"
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


def _upright(source: _Source) -> Any:
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
    """1/sqrt(head_dim) in f32, which the model may have rounded to f16."""
    exact = 1.0 / math.sqrt(width)
    if attention.get_input_size() > 5:
        raise UsageError(f"{name}: attention with learned sinks is not supported on OpenVINO")
    if attention.get_input_size() == 5:
        node = attention.input_value(4).get_node()
        while node.get_type_name() == "Convert":
            node = node.input_value(0).get_node()
        given = float(np.asarray(node.get_data()).reshape(())) if node.get_type_name() == "Constant" else math.nan
        if not abs(given - exact) <= exact * 2**-10:
            raise UsageError(
                f"{name}: attention is scaled by {given}, not by 1/sqrt(head_dim) = {exact}; not supported"
            )
    return np.float32(exact)


def _choose_rows(model: Any, chosen: Any, name: str) -> None:
    """Only the rows of `inp_out_ids` go through the head's matrix; where that is not found, all rows do."""
    result = model.get_results()[0]
    logits = result.input_value(0)
    if len(model.get_results()) != 1 or logits.get_partial_shape().rank.get_length() != 3:
        raise UsageError(f"{name}: the result is {logits.get_partial_shape()}, not one of logits; {_EXPORT}")
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
