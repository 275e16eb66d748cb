"""From a GGUF file to an OpenVINO graph that keeps its KV cache in states and shows every new row.

The GGUF frontend gives a stateless graph: caches come in as parameters and go out as results, in f16. Here each
cache becomes a variable, and attention stays in f32:

    cache_k_l0 (parameter)                           ReadValue(cache_k_l0) -> Gather(beam_idx) -+
    new rows -> ScatterUpdate -> Transpose -> SDPA   new rows [1,G,T,D] -----------------------Concat -> Assign
                      |                                                                          |
                      +-> Result                                                                 +-> repeat -> SDPA
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op
from openvino.frontend import FrontEndManager

from kvtape.backends.errors import EnvironmentProblem, UsageError
from kvtape.backends.openvino.graph import (
    TRANSPOSE,
    Cache,
    SessionGraph,
    State,
    beam_input,
    exact_scale,
    finished,
    last_line,
    repeat_heads,
    replace_value,
    state_of,
)

__all__ = ["build_gguf_graph"]


def build_gguf_graph(path: str | Path, *, queries: bool = False) -> SessionGraph:
    """Convert `path`. `queries` adds the post-RoPE queries as `q_rows` `[layers, heads, T, head_dim]`.

    Raises UsageError when the frontend refuses the file, EnvironmentProblem when its graph is not what this expects.
    """
    model = _convert(Path(path))
    _keep_attention_in_f32(model)
    _repair_single_head_rotation(model)
    caches = _make_stateful(model)
    nodes = [node for node in model.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention"]
    keys, values = _rewire(nodes, caches)
    return finished(model, nodes, keys, values, queries=queries)


def _convert(path: Path) -> Any:
    # The frontend ships in the wheel but is hidden from discovery: it is reached by name only.
    frontend = FrontEndManager().load_by_framework("gguf")
    if frontend is None:
        raise EnvironmentProblem("this OpenVINO has no GGUF frontend; install openvino 2026.4.1 or newer")
    try:
        return frontend.convert(frontend.load(str(path)))
    except Exception as err:  # the bindings raise RuntimeError and subclasses of their own
        raise UsageError(
            f"{path}: OpenVINO cannot read this GGUF: {last_line(err)}; take --backend llama, or give another model"
        ) from None


def _name(node: Any) -> str:
    return str(next(iter(sorted(node.get_output_tensor(0).get_names())), ""))


def _keep_attention_in_f32(model: Any) -> None:
    """Drop the round trips to f16, so that splitting a prefill into chunks does not change its result."""
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind == "Convert" and node.get_output_element_type(0) == ov.Type.f16:
            source = node.input_value(0)
            if source.get_element_type() == ov.Type.f32 and source.get_node().get_type_name() != "Constant":
                replace_value(node.output(0), source)
        elif kind == "Parameter" and _name(node).startswith("cache_"):
            node.set_element_type(ov.Type.f32)
        elif kind == "ScaledDotProductAttention":
            node.input(4).replace_source_output(op.constant(_exact_scale(node)).output(0))


def _exact_scale(attention: Any) -> np.float32:
    constant = attention.input_value(4).get_node() if len(attention.input_values()) > 4 else None
    if constant is None or constant.get_type_name() != "Constant":
        raise EnvironmentProblem("an attention node of the GGUF frontend's graph has no constant scale")
    width = attention.input_value(0).get_partial_shape()[3].get_length()
    return exact_scale(float(np.asarray(constant.get_data()).reshape(())), width, attention.get_friendly_name())


def _repair_single_head_rotation(model: Any) -> None:
    """Give the keys of a model with one KV head the shape their rotation needs.

    The frontend multiplies such keys, still `[1, 1, T, D]`, by cosines `[1, T, 1, D]`. That broadcasts to
    `[1, T, T, D]`: every key at every position, T rows too many for T > 1.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Multiply":
            continue
        keys, cosines = (node.input_value(i).get_partial_shape() for i in (0, 1))
        if len(keys) != 4 or len(cosines) != 4 or not (keys[2].is_dynamic and cosines[1].is_dynamic):
            continue
        if keys[1].is_static and cosines[2].is_static and keys[1].get_length() == cosines[2].get_length() == 1:
            upright = op.constant(np.array([1, -1, 1, keys[3].get_length()]))
            node.input(0).replace_source_output(op.reshape(node.input_value(0), upright, special_zero=False).output(0))
    model.validate_nodes_and_infer_types()


def _make_stateful(model: Any) -> dict[str, Cache]:
    """Turn every cache parameter into a variable; returns the caches by the name of their concat node."""
    beam = beam_input()
    caches: dict[str, Cache] = {}
    variables, sinks, results, parameters = [], [], [], []
    for scatter, parameter in list(_cache_writes(model)):
        state = _stateful_cache(scatter, parameter, beam)
        cache = state.cache
        caches[cache.whole.get_node().get_friendly_name()] = cache
        variables.append(state.variable)
        sinks.append(state.sink)
        parameters.append(parameter)
        back = op.transpose(cache.whole, op.constant(np.array(TRANSPOSE)))
        for target in list(scatter.output(0).get_target_inputs()):
            if target.get_node().get_type_name() == "Result":
                results.append(target.get_node())
            else:
                target.replace_source_output(back.output(0))
    if not caches:
        raise EnvironmentProblem("the GGUF frontend gave a graph without KV caches; take --backend llama")
    for result in results:
        model.remove_result(result)
    model.add_parameters([beam])
    model.add_variables(variables)
    model.add_sinks(sinks)
    for parameter in parameters:
        model.remove_parameter(parameter)
    return caches


def _cache_writes(model: Any) -> Iterator[tuple[Any, Any]]:
    for node in model.get_ordered_ops():
        if node.get_type_name() == "ScatterUpdate":
            source = node.input_value(0).get_node()
            if source.get_type_name() == "Parameter" and _name(source).startswith("cache_"):
                yield node, source


def _stateful_cache(scatter: Any, parameter: Any, beam: Any) -> State:
    shape = parameter.get_output_partial_shape(0)
    heads, width = shape[2].get_length(), shape[3].get_length()
    # Behind the reshape that flattens them: [1, T, heads, width], with T elsewhere when there is one head.
    raw = scatter.input_value(2).get_node().input_value(0)
    if heads == 1:
        rows = op.reshape(raw, op.constant(np.array([1, 1, -1, width])), special_zero=False)
    else:
        rows = op.transpose(raw, op.constant(np.array(TRANSPOSE)))
    return state_of(_name(parameter), rows, beam)


def _rewire(attention: list[Any], caches: dict[str, Cache]) -> tuple[list[Cache], list[Cache]]:
    """Feed each attention node from its caches in the form the CPU plugin fuses; keys and values by layer."""
    keys: dict[int, Cache] = {}
    values: dict[int, Cache] = {}
    for layer, node in enumerate(attention):
        heads = node.input_value(0).get_partial_shape()[1].get_length()
        for port, found in ((1, keys), (2, values)):
            cache = _source_cache(node.input_value(port).get_node(), caches)
            node.input(port).replace_source_output(repeat_heads(cache.whole, heads))
            found[layer] = cache
    for layer in range(len(attention)):
        want = (f"cache_k_l{layer}", f"cache_v_l{layer}")
        if (keys[layer].name, values[layer].name) != want:
            raise EnvironmentProblem(f"attention {layer} reads {keys[layer].name} and {values[layer].name}, not {want}")
    if 2 * len(attention) != len(caches):
        raise EnvironmentProblem(f"{len(caches)} caches for {len(attention)} attention nodes; take --backend llama")
    return list(keys.values()), list(values.values())


def _source_cache(node: Any, caches: dict[str, Cache]) -> Cache:
    while node.get_friendly_name() not in caches:
        if not node.input_values():
            raise EnvironmentProblem("an attention node of the GGUF frontend's graph reads no KV cache")
        node = node.input_value(0).get_node()
    return caches[node.get_friendly_name()]
