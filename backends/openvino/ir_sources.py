"""What an OpenVINO model directory's graph has: its inputs, and the cache behind each attention node.

Everything that a session could not keep is refused here, by what the graph is: other inputs, fixed shapes, states
beside keys and values, layers that share one, heads that are repeated in another way than in plain groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtape.backends.errors import UsageError
from kvtape.backends.openvino.graph import TRANSPOSE

__all__ = ["EXPORT", "CacheSource", "cache_sources", "text_inputs"]

_INPUTS = ("input_ids", "attention_mask", "position_ids", "beam_idx")

EXPORT = "export it anew with `optimum-cli export openvino --task text-generation-with-past`"
"""The remedy for graphs that came from elsewhere, or from older tools."""

_BETWEEN = frozenset({"Broadcast", "Convert", "Reshape", "Tile", "Transpose", "Unsqueeze"})
"""What may stand between a cache and its attention: an order of axes, and the repetition of heads in plain groups."""

_REPEATED = (("Unsqueeze", "Broadcast", "Reshape"), ("Unsqueeze", "Tile", "Reshape"))


@dataclass(frozen=True, slots=True)
class CacheSource:
    """One cache as the model has it: the concatenation, its new rows `[1, G, T, D]` (or `[1, T, G, D]`), its state."""

    whole: Any
    rows: Any
    state: str


def text_inputs(model: Any, name: str) -> dict[str, Any]:
    """The parameters by name. Raises UsageError for one that is missing, or one too many."""
    found: dict[str, Any] = {}
    for node in model.get_parameters():
        names = node.output(0).get_names()
        found[next((n for n in _INPUTS if n in names), ", ".join(sorted(names)) or node.get_friendly_name())] = node
    missing = [n for n in ("input_ids", "position_ids", "beam_idx") if n not in found]
    if missing:
        raise UsageError(f"{name}: the graph has no input {', '.join(missing)}; {EXPORT}")
    more = sorted(set(found) - set(_INPUTS))
    if more:
        raise UsageError(f"{name}: the graph has the inputs {', '.join(more)}, which sessions on text cannot fill")
    for n, rank in (("input_ids", 2), ("position_ids", 2)):
        shape = found[n].get_output_partial_shape(0)
        if shape.rank.is_dynamic or len(shape) != rank:
            raise UsageError(f"{name}: the input {n} is {shape}, not [batch, tokens]; sessions cannot fill it")
        if any(size.is_static for size in shape):
            raise UsageError(f"{name}: the input {n} has the fixed shape {shape}; {EXPORT}, with dynamic shapes")
    return found


def cache_sources(model: Any, attention: list[Any], name: str) -> list[tuple[CacheSource, CacheSource]]:
    """Keys and values of each attention node. Raises UsageError for what is no cache of a layer of its own."""
    found = [(_source(node, 1, name), _source(node, 2, name)) for node in attention]
    _check_states(model, found, name)
    return found


def _source(attention: Any, port: int, name: str) -> CacheSource:
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
            f"{node.get_type_name()}); {EXPORT}, stateful"
        )
    if not _in_plain_groups(between, node.get_attributes()["axis"] % 4):
        way = ", ".join(step.get_type_name() for step in between) or "nothing"
        raise UsageError(
            f"{name}: between the cache and attention the {what} go through {way}; this layout is not known"
        )
    return CacheSource(node, node.input_value(1), str(past.get_attributes()["variable_id"]))


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


def _check_states(model: Any, sources: list[tuple[CacheSource, CacheSource]], name: str) -> None:
    used = [source.state for pair in sources for source in pair]
    known = {str(variable.info.variable_id) for variable in model.get_variables()}
    if len(set(used)) != len(used):
        raise UsageError(
            f"{name}: layers share a cache, which sessions cannot keep; take --backend llama with a GGUF of it"
        )
    if set(used) != known:
        others = ", ".join(sorted(known - set(used))[:4])
        raise UsageError(f"{name}: states beside keys and values ({others}); sessions cannot cut those by tokens")
