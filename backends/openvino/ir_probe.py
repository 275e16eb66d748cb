"""What a model's own mask is, found out by executing that part of its graph.

Before the mask of a model directory is replaced by ours it is run on inputs that tell: that of a whole prompt must be
causal, and a query at the end of the trained context must see every row before it (no window, no chunks).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as op

from kvtape.backends.errors import UsageError
from kvtape.backends.openvino.graph import last_line, replace_value
from kvtape.backends.openvino.runtime import core
from kvtape.backends.openvino.signal_stack import kept_signal_stack

__all__ = ["check_mask"]

_FEW = 5
_HIDDEN = -1e4
"""A bias so low hides a row; f16 has none below -65504."""

Array = npt.NDArray[Any]


def check_mask(model: Any, attention: list[Any], caches: list[Any], n_ctx: int, name: str) -> None:
    """`attention`: the nodes, in order; `caches`: of each its keys' and then its values' concatenation.

    `n_ctx` in tokens. Raises UsageError where attention is anything but causal, over all rows.
    """
    if any(node.get_attributes()["causal"] or node.get_input_size() < 4 for node in attention):
        raise UsageError(f"{name}: an attention node has no mask of its own; sessions need one for each query and key")
    probe = _Probe(model, attention, caches, name)
    probe.check(_FEW, 0)
    probe.check(1, max(_FEW, n_ctx - 1))


class _Probe:
    """The part of a copy of the model between its inputs and caches and the masks."""

    def __init__(self, model: Any, attention: list[Any], caches: list[Any], name: str) -> None:
        self._name = name
        copy = model.clone()
        nodes = {node.get_friendly_name(): node for node in copy.get_ops()}
        found = [nodes[node.get_friendly_name()] for node in attention]
        axes = {_state_of(node): _axis(node) for node in caches}
        self._masks = list({_key(o): o for o in (node.input_value(3) for node in found)}.values())
        self._whole = [(_cut(nodes[node.get_friendly_name()]), _axis(node)) for node in caches]
        reads = [node for node in copy.get_ops() if node.get_type_name() == "ReadValue"]
        self._past = [(_cut(node), axes[node.get_attributes()["variable_id"]]) for node in reads]
        self._parameters = _parameters(self._masks)
        self._request: Any = None

    def check(self, n_new: int, n_past: int) -> None:
        """Each of `n_new` queries behind `n_past` rows sees those, itself and what was new before it."""
        want = np.arange(n_past + n_new)[None, :] <= n_past + np.arange(n_new)[:, None]
        for mask in self._run(n_new, n_past):
            sees = mask if mask.dtype == bool else mask > _HIDDEN
            plain = mask.dtype == bool or not mask[sees].any()
            same = sees.shape[-2:] == want.shape and bool((sees == want).all())
            if not (plain and same):
                raise UsageError(
                    f"{self._name}: its attention is not causal over all of {n_past + n_new} rows (a sliding window, "
                    "chunks, or a bias); not supported on OpenVINO, use a GGUF of it on the llama backend"
                )

    def _run(self, n_new: int, n_past: int) -> list[Array]:
        feed = {
            **{_key(p): _rows(p, axis, n_past + n_new) for p, axis in self._whole},
            **{_key(p): _rows(p, axis, n_past) for p, axis in self._past},
        }
        try:
            if self._request is None:
                self._request = self._compiled()
            given = [feed[_key(p)] if _key(p) in feed else _of_text(p, n_new, n_past) for p in self._parameters]
            self._request.infer(dict(enumerate(given)))
            return [np.array(self._request.get_output_tensor(i).data) for i in range(len(self._masks))]
        except (RuntimeError, KeyError) as err:
            raise UsageError(
                f"{self._name}: the mask of its attention cannot be computed apart ({last_line(err)}), so it is "
                "not known; not supported on OpenVINO, use a GGUF of it"
            ) from None

    def _compiled(self) -> Any:
        part = ov.Model([op.result(mask) for mask in self._masks], self._parameters, "masks")
        part.validate_nodes_and_infer_types()
        with kept_signal_stack():
            return core().compile_model(part, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()


def _axis(concat: Any) -> int:
    return int(concat.get_attributes()["axis"]) % 4


def _state_of(concat: Any) -> str:
    node = concat.input_value(0).get_node()
    while node.get_type_name() != "ReadValue":
        node = node.input_value(0).get_node()
    return str(node.get_attributes()["variable_id"])


def _key(value: Any) -> str:
    """A node by its name and, of a value, which of its outputs it is."""
    node = value.get_node() if hasattr(value, "get_node") else value
    return f"{node.get_friendly_name()}:{value.get_index() if hasattr(value, 'get_node') else ''}"


def _cut(node: Any) -> Any:
    """A parameter of the same rank in the node's place. A mask asks caches for their length, never for their rows."""
    rank = len(node.get_output_partial_shape(0))
    parameter = op.parameter(ov.PartialShape([ov.Dimension()] * rank), node.get_output_element_type(0))
    replace_value(node.output(0), parameter.output(0))
    return parameter


def _rows(parameter: Any, axis: int, n: int) -> Array:
    rank = len(parameter.get_output_partial_shape(0))
    return np.zeros([n if i == axis else 1 for i in range(rank)], np.float32)


def _of_text(parameter: Any, n_new: int, n_past: int) -> Array:
    """What a text gives the inputs of the model itself. Raises KeyError for an input that no text has."""
    kinds: Mapping[str, Array] = {
        "input_ids": np.zeros((1, n_new), np.int64),
        "attention_mask": np.ones((1, n_past + n_new), np.int64),
        "position_ids": np.arange(n_past, n_past + n_new)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    return kinds[next(iter(sorted(parameter.output(0).get_names())))]


def _parameters(outputs: list[Any]) -> list[Any]:
    """The parameters that the outputs depend on, each once."""
    found: list[Any] = []
    waiting, seen = [output.get_node() for output in outputs], set()
    while waiting:
        node = waiting.pop()
        if (key := node.get_friendly_name()) in seen:
            continue
        seen.add(key)
        if node.get_type_name() == "Parameter":
            found.append(node)
        waiting += [value.get_node() for value in node.input_values()]
    return found
