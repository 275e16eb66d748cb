"""The graph of an OpenVINO model directory, read from its XML and weights file without OpenVINO.

    <layer id name type> data, input and output ports </layer> ...    <edge from-layer from-port to-layer to-port/> ...

Constants are views of the mapped weights file. Bodies of loops and branches are not looked into.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from xml.etree.ElementTree import Element, ParseError, parse

import numpy as np
import numpy.typing as npt

from kvtape.capacity.errors import ModelFileError

__all__ = ["IrGraph", "IrNode", "Wire", "read_ir_graph"]

_DTYPES: Final = {
    "f64": "<f8", "f32": "<f4", "f16": "<f2", "i64": "<i8", "i32": "<i4", "i16": "<i2", "i8": "<i1", "u64": "<u8",
    "u32": "<u4", "u16": "<u2", "u8": "<u1", "boolean": "<u1",
}  # fmt: skip
_PLACES: Final = frozenset({"offset", "size"})


@dataclass(frozen=True, slots=True)
class Wire:
    """Where a value comes from: an output of a node. `shape` has -1 for a size that is not fixed."""

    node: IrNode
    output: int
    shape: tuple[int, ...]


@dataclass(eq=False, slots=True)
class IrNode:
    """One operation. `kind` as OpenVINO names it (`Const` for a constant), `data` its attributes as text."""

    number: int
    kind: str
    name: str
    data: dict[str, str]
    inputs: list[Wire] = field(default_factory=list)
    users: list[IrNode] = field(default_factory=list)


class IrGraph:
    """`nodes` in the file's order, which is one of execution. `settings`: its own `rt_info`, names to texts."""

    def __init__(self, file: Path, nodes: list[IrNode], settings: dict[str, str]) -> None:
        self.file = file
        self.nodes = nodes
        self.settings = settings

    @property
    def weights_file(self) -> Path:
        return self.file.with_suffix(".bin")

    def of_kind(self, *kinds: str) -> list[IrNode]:
        return [node for node in self.nodes if node.kind in kinds]

    def constant(self, node: IrNode) -> npt.NDArray[Any]:
        """A view of the weights file; bf16 as f32, 4-bit integers as bytes. Raises ModelFileError for a cut file, or an
        element type that is none of those.
        """
        kind = node.data.get("element_type", "")
        raw = self.raw_constant(node)
        shape = [int(n) for n in node.data.get("shape", "").split(",") if n.strip()]
        try:
            if kind in ("u4", "i4"):
                return _nibbles(raw, math.prod(shape), signed=kind == "i4").reshape(shape)
            if kind == "bf16":
                return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
            if kind not in _DTYPES:
                raise ModelFileError(f"{self.file}: the constant {node.name} is {kind}; not known")
            return np.frombuffer(raw, _DTYPES[kind]).reshape(shape)
        except ValueError:
            raise ModelFileError(
                f"{self.file}: the constant {node.name} of shape {shape} has {len(raw)} bytes; copy the model again"
            ) from None

    def raw_constant(self, node: IrNode) -> memoryview:
        """Its bytes. Raises ModelFileError where the weights file ends before them."""
        start, size = int(node.data.get("offset", "0")), int(node.data.get("size", "0"))
        raw = self._weights
        if start < 0 or size < 0 or start + size > len(raw):
            raise ModelFileError(
                f"{self.weights_file}: {len(raw)} bytes, but {node.name} is at {start} to {start + size}; the file is "
                "cut or of another model, copy the folder again"
            )
        return raw[start : start + size]

    def structure(self) -> str:
        """A digest of the operations and how they are connected: no names, which differ from one saving to the next."""
        digest = hashlib.sha256()
        for node in self.nodes:
            said = sorted((k, v) for k, v in node.data.items() if k not in _PLACES)
            wires = [(wire.node.number, wire.output) for wire in node.inputs]
            digest.update(repr((node.number, node.kind, said, wires)).encode())
        return digest.hexdigest()

    @cached_property
    def _weights(self) -> memoryview:
        if not self.weights_file.is_file():
            raise ModelFileError(f"{self.weights_file}: the weights are missing; copy the whole folder of the model")
        if not self.weights_file.stat().st_size:
            return memoryview(b"")
        return memoryview(np.memmap(self.weights_file, np.uint8, "r"))  # type: ignore[arg-type]


def read_ir_graph(file: Path) -> IrGraph:
    """Raises ModelFileError for XML that is damaged, or that describes no graph."""
    try:
        root = parse(file).getroot()
    except ParseError as err:
        raise ModelFileError(f"{file}: damaged XML ({err}); export or copy the model again") from None
    try:
        nodes = {int(layer.attrib["id"]): _node(layer) for layer in root.findall("./layers/layer")}
        shapes = {int(layer.attrib["id"]): list(_shapes(layer)) for layer in root.findall("./layers/layer")}
        for _, source, port, target in sorted(_edges(root)):
            at = next(i for i, (number, _) in enumerate(shapes[source]) if number == port)
            nodes[target].inputs.append(Wire(nodes[source], at, shapes[source][at][1]))
            nodes[source].users.append(nodes[target])
    except (KeyError, ValueError, StopIteration) as err:
        raise ModelFileError(f"{file}: not the XML of an OpenVINO model ({err!r}); export or copy it again") from None
    settings = {
        str(entry.tag if entry.tag != "info" else entry.get("name")): entry.get("value", "")
        for entry in root.findall("./rt_info/*")
    }
    return IrGraph(file, list(nodes.values()), settings)


def _nibbles(raw: memoryview, n: int, *, signed: bool) -> npt.NDArray[Any]:
    """`n` numbers of 4 bits, the low half of a byte first."""
    packed = np.frombuffer(raw, np.uint8)
    numbers = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)[:n]
    return np.where(numbers > 7, numbers.astype(np.int8) - 16, numbers.astype(np.int8)) if signed else numbers


def _node(layer: Element) -> IrNode:
    data = layer.find("data")
    said = dict(data.attrib) if data is not None else {}
    return IrNode(int(layer.attrib["id"]), layer.attrib["type"], layer.get("name", ""), said)


def _shapes(layer: Element) -> Iterator[tuple[int, tuple[int, ...]]]:
    for port in layer.findall("./output/port"):
        yield int(port.attrib["id"]), tuple(int(dim.text or "-1") for dim in port.findall("dim"))


def _edges(root: Element) -> Iterator[tuple[tuple[int, int], int, int, int]]:
    """Sorted, the inputs of a node come in the order of its ports."""
    for edge in root.findall("./edges/edge"):
        source, port, target, to = (int(edge.attrib[k]) for k in ("from-layer", "from-port", "to-layer", "to-port"))
        yield (target, to), source, port, target
