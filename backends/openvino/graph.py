"""The graph that a session runs on, whatever it was made from: caches in states, new rows and queries in sight.

    ReadValue(cache_k_l0) -> Gather(beam_idx) -+
    new rows [1,G,T,D] -----------------------Concat -> Assign(cache_k_l0)
                                                |
                                                +-> repeat -> ScaledDotProductAttention

New rows of all layers leave the graph as `k_rows` and `v_rows` (`[layers, kv_heads, T, head_dim]`). They cost
nothing measurable and leave the fused attention node whole; a result on the concatenated cache would break it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from openvino import op as base_op
from openvino import opset13 as op
from openvino.op.util import Variable, VariableInfo

from kvtape.backends.errors import UsageError

__all__ = [
    "TRANSPOSE",
    "Cache",
    "GraphShape",
    "SessionGraph",
    "State",
    "beam_input",
    "exact_scale",
    "finished",
    "last_line",
    "repeat_heads",
    "replace_value",
    "state_of",
]

TRANSPOSE = (0, 2, 1, 3)
"""Between heads first and tokens first."""


@dataclass(frozen=True, slots=True)
class GraphShape:
    """Sizes of the queries and caches, the same in every layer, and of the logits."""

    layers: int
    heads: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    n_vocab: int


@dataclass(frozen=True, slots=True)
class SessionGraph:
    """A stateful model and the sizes of its caches.

    Inputs: inp_tokens, inp_pos, inp_out_ids, self_kq_mask, beam_idx; of a GGUF two more, which do nothing now. Outputs:
    `logits` `[1, 1, len(inp_out_ids), n_vocab]`, `k_rows`, `v_rows` and, when asked for, `q_rows`. States are named
    cache_k_l0, cache_v_l0, ...: `[1, kv_heads, rows, head_dim]` f32.
    """

    model: Any
    shape: GraphShape


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache of one layer: its name, the new rows `[1, G, T, D]` and the whole cache `[1, G, rows, D]`."""

    name: str
    rows: Any
    whole: Any


@dataclass(frozen=True, slots=True)
class State:
    """A cache with the variable that keeps it and the sink that fills it, both still to be added to a model."""

    cache: Cache
    variable: Any
    sink: Any


def beam_input() -> Any:
    """The parameter `beam_idx`, which the CPU plugin looks for when it fuses state and attention."""
    beam = op.parameter([-1], np.int32, "beam_idx")
    beam.output(0).get_tensor().set_names({"beam_idx"})
    return beam


def state_of(name: str, rows: Any, beam: Any) -> State:
    """The cache `name`, whose new rows are the node `rows` `[1, G, T, D]` in f32."""
    shape = rows.get_output_partial_shape(0)
    heads, width = shape[1].get_length(), shape[3].get_length()
    info = VariableInfo()
    info.variable_id = name
    info.data_type = ov.Type.f32
    info.data_shape = ov.PartialShape([-1, heads, -1, width])
    variable = Variable(info)
    empty = op.broadcast(op.constant(np.float32(0)), op.constant(np.array([1, heads, 0, width])))
    read = op.gather(base_op.read_value(empty, variable), beam, op.constant(np.int64(0)))
    whole = op.concat([read.output(0), rows.output(0)], 2)
    return State(Cache(name, rows.output(0), whole.output(0)), variable, base_op.assign(whole, variable))


def repeat_heads(whole: Any, heads: int) -> Any:
    shape = whole.get_partial_shape()
    kv_heads, width = shape[1].get_length(), shape[3].get_length()
    if heads == kv_heads:
        return whole
    apart = op.unsqueeze(whole, op.constant(np.int64(2)))
    times = op.constant(np.array([1, 1, heads // kv_heads, 1, 1]))
    wide = op.broadcast(apart, times, broadcast_spec="BIDIRECTIONAL")
    return op.reshape(wide, op.constant(np.array([0, heads, -1, width])), special_zero=True).output(0)


def exact_scale(given: float | None, head_dim: int, where: str) -> np.float32:
    """1/sqrt(head_dim) in f32, for the scale `given` by a graph (None: by default), which may be rounded to f16.

    For a head of 32 that rounding moves logits by 1e-4. Raises UsageError for another scale.
    """
    exact = 1.0 / math.sqrt(head_dim)
    if given is not None and not abs(given - exact) <= exact * 2**-10:
        raise UsageError(f"{where}: attention is scaled by {given}, not by 1/sqrt(head_dim) = {exact}; not supported")
    return np.float32(exact)


def replace_value(old: Any, new: Any) -> None:
    """Whoever reads the output `old` reads `new`."""
    for target in list(old.get_target_inputs()):
        target.replace_source_output(new)


def finished(
    model: Any, attention: list[Any], keys: list[Cache], values: list[Cache], *, queries: bool
) -> SessionGraph:
    """`model` with its rows (and `queries`) as outputs. Raises UsageError for layers of different sizes."""
    shown = {"k_rows": [c.rows for c in keys], "v_rows": [c.rows for c in values]}
    if queries:
        shown["q_rows"] = [node.input_value(0) for node in attention]
    _show(model, shown)
    model.outputs[0].get_tensor().set_names({"logits"})
    model.validate_nodes_and_infer_types()
    return SessionGraph(model, _shape(model, attention, keys, values))


def last_line(err: BaseException) -> str:
    """What OpenVINO's stack of messages comes to; the name of the error where it has no text."""
    return next((line.strip() for line in reversed(str(err).splitlines()) if line.strip()), type(err).__name__)


def _show(model: Any, shown: dict[str, list[Any]]) -> None:
    """One result for all layers: one copy a call instead of one a layer."""
    results = []
    for name, rows in shown.items():
        result = op.result(op.concat(rows, 0) if len(rows) > 1 else rows[0])
        result.input_value(0).get_tensor().add_names({name})
        results.append(result)
    model.add_results(results)


def _shape(model: Any, attention: list[Any], keys: list[Cache], values: list[Cache]) -> GraphShape:
    def sizes(caches: list[Cache]) -> set[tuple[int, int]]:
        shapes = [c.rows.get_partial_shape() for c in caches]
        return {(s[1].get_length(), s[3].get_length()) for s in shapes}

    if len(sizes(keys)) != 1 or len(sizes(values)) != 1:
        raise UsageError("layers with different KV shapes are not supported on OpenVINO; take --backend llama")
    heads = {node.input_value(0).get_partial_shape()[1].get_length() for node in attention}
    if len(heads) != 1:
        raise UsageError("layers with different numbers of heads are not supported on OpenVINO; take --backend llama")
    (kv_heads, head_dim_k), (_, head_dim_v) = sizes(keys).pop(), sizes(values).pop()
    n_vocab = model.outputs[0].get_partial_shape()[3].get_length()
    return GraphShape(len(keys), heads.pop(), kv_heads, head_dim_k, head_dim_v, n_vocab)
