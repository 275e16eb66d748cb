"""The KV states of an OpenVINO model directory, read from the graph's XML without loading the model."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import ParseError, iterparse

from kvtape.capacity.errors import ModelFileError
from kvtape.capacity.geometry import KVGeometry, LayerGroup, LayerKind
from kvtape.capacity.ir_files import CONFIG, ir_graph_file, read_settings
from kvtape.capacity.layers import ModelKV

__all__ = ["openvino_model_kv"]

_KEY = re.compile(r"key|cache_k|conv", re.IGNORECASE)
_VALUE = re.compile(r"value|cache_v|ssm|recurrent|state", re.IGNORECASE)


def openvino_model_kv(folder: str | Path) -> ModelKV:
    """Layers from the shapes of the model's states; the trained context from its config.json.

    A state with a dynamic axis behind the batch grows by a row a token; one without is a recurrent state. Raises
    ModelFileError for a folder without a graph, a graph without states, or states that cannot be told apart.
    """
    path = Path(folder)
    graph = ir_graph_file(path)
    layers: dict[int, dict[str, tuple[bool, int, int]]] = defaultdict(dict)
    for name, shape in _variables(graph):
        layer, role = _place(graph, name)
        if role in layers[layer]:
            raise ModelFileError(f"{graph}: layer {layer} has two states of {role}; this layout is not known")
        layers[layer][role] = _per_token(graph, name, shape)
    if not layers:
        raise ModelFileError(f"{graph}: the graph has no states; export it as a stateful model")
    weights = graph.with_suffix(".bin")
    config = read_settings(path / CONFIG)
    return ModelKV(
        arch=str(config.get("model_type", "openvino")),
        model_max=_whole(path / CONFIG, config, "max_position_embeddings"),
        geometry=KVGeometry(tuple(_groups(layers))),
        notes=_notes(config),
        weights_bytes=weights.stat().st_size if weights.is_file() else 0,
    )


def _variables(graph: Path) -> Iterator[tuple[str, str]]:
    """Name and shape of every state, in the graph's order; the file is read as a stream."""
    try:
        for _, element in iterparse(graph):
            if element.tag == "data" and element.get("variable_shape") is not None:
                yield str(element.get("variable_id")), str(element.get("variable_shape"))
            elif element.tag == "layer":
                element.clear()
    except ParseError as err:
        raise ModelFileError(f"{graph}: damaged XML ({err}); export or copy the model again") from None


def _place(graph: Path, name: str) -> tuple[int, str]:
    """Layer and role of a state, from its name: `past_key_values.3.keypresent.3.key`, `cache_v_l3`."""
    number = re.search(r"\d+", name)
    role = "values" if _VALUE.search(name.replace("past_key_values", "")) else "keys" if _KEY.search(name) else None
    if number is None or role is None:
        raise ModelFileError(f"{graph}: the state {name!r} is neither keys nor values of a layer; this is not known")
    return int(number.group()), role


def _per_token(graph: Path, name: str, shape: str) -> tuple[bool, int, int]:
    """Does it grow with the tokens; elements of a row (or of the state); heads."""
    axes = shape.split(",") if shape else []
    fixed = [int(axis) if axis.strip().isdigit() else 0 for axis in axes]
    if len(fixed) < 2:
        raise ModelFileError(f"{graph}: the state {name!r} has the shape [{shape}], which no cache has")
    grows = 0 in fixed[1:]
    sizes = [n for n in fixed[1:] if n]
    elements = math.prod(sizes)
    return grows, elements, elements // sizes[-1] if sizes and grows else 1


def _groups(layers: dict[int, dict[str, tuple[bool, int, int]]]) -> list[LayerGroup]:
    counts: dict[tuple[bool, int, int, int], int] = {}
    for _, roles in sorted(layers.items()):
        grows, k, heads = roles.get("keys", (roles.get("values", (True, 0, 1))[0], 0, 1))
        v = roles.get("values", (grows, 0, 1))[1]
        counts[grows, k, v, heads] = counts.get((grows, k, v, heads), 0) + 1
    groups = []
    for (grows, k, v, heads), count in counts.items():
        if grows:
            groups.append(LayerGroup(LayerKind.GLOBAL, count, k, v, heads))
        else:
            groups.append(LayerGroup(LayerKind.RECURRENT, count, k, v, type_k="f32", type_v="f32"))
    return groups


def _whole(path: Path, config: dict[str, Any], key: str) -> int:
    """0 where the key is missing or null."""
    value = config.get(key) or 0
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise ModelFileError(f"{path}: {key} is {value!r}; a whole number from 0 on is needed")
    return value


def _notes(config: dict[str, Any]) -> tuple[str, ...]:
    window = config.get("sliding_window")
    if not window:
        return ()
    return (f"the window of {window} tokens masks rows but frees none: the states keep every row",)
