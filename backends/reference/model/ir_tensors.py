"""The weights of an OpenVINO model directory under the names that a GGUF gives them, found by what the graph does.

Saved graphs name their constants as they like, so a matrix is known by its place: what a query of an attention node is
the product of, what goes into a gate. Nothing of OpenVINO is used. A graph that multiplies by more than is found here
is another model, and refused.

    token_embd -> [ attn_norm -> attn_q, attn_k, attn_v (+ bias, + norm) -> attention -> attn_output -> +
                    ffn_norm -> silu(ffn_gate) * ffn_up -> ffn_down -> + ] x layers -> output_norm -> output
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtape.backends.reference.errors import ModelUnsupported
from kvtape.backends.reference.model.ir_constants import behind_converts, is_static, matrix, vector
from kvtape.backends.reference.model.matrix import Tensor
from kvtape.capacity.ir_files import ir_graph_file
from kvtape.capacity.ir_graph import IrGraph, IrNode, Wire, read_ir_graph

__all__ = ["ir_tensors"]

_REPEATS: Final = frozenset({"Broadcast", "Convert", "Reshape", "Tile", "Transpose", "Unsqueeze"})
_MOVES: Final = frozenset({"Convert", "Reshape", "Transpose"})
_NORM: Final = frozenset({"Convert", "Divide", "Multiply"})
_ENDS: Final = frozenset({"Cos", "Sin", "ShapeOf", "Parameter", "ReadValue"})


def ir_tensors(folder: str | Path, n_embd: int) -> list[Tensor]:
    """Raises ModelUnsupported where the graph is no plain decoder, ModelFileError for a damaged folder."""
    graph = read_ir_graph(ir_graph_file(Path(folder)))
    return list(_Decoder(graph, n_embd).tensors())


class _Decoder:
    def __init__(self, graph: IrGraph, n_embd: int) -> None:
        self._graph, self._n_embd = graph, n_embd
        self._used: set[int] = set()

    def tensors(self) -> Iterator[Tensor]:
        attention, gates = self._graph.of_kind("ScaledDotProductAttention"), self._graph.of_kind("Swish")
        if len(attention) != len(gates):
            raise self._refused(f"{len(attention)} attention nodes beside {len(gates)} SiLU gates")
        yield from self._ends()
        for layer, (node, gate) in enumerate(zip(attention, gates, strict=True)):
            yield from self._attention(f"blk.{layer}.", node)
            yield from self._feed_forward(f"blk.{layer}.", gate)
        products = [n for n in self._graph.of_kind("MatMul") if is_static(n.inputs[1].node)]
        if len(products) != len(self._used):
            raise self._refused(f"{len(products)} products with weights, of which {len(self._used)} are known")

    def _ends(self) -> Iterator[Tensor]:
        lookups = [n for n in self._graph.of_kind("Gather") if is_static(n.inputs[0].node) and _is_lookup(n)]
        if len(lookups) != 1:
            raise self._refused(f"{len(lookups)} tables looked up by token")
        table = lookups[0].inputs[0].node
        yield self._matrix("token_embd.weight", table, transposed=False)
        head = behind_converts(self._graph.of_kind("Result")[0].inputs[0].node)
        if head.kind != "MatMul" or not is_static(head.inputs[1].node):
            raise self._refused(f"logits from {head.kind}, not from a product with weights")
        if _constants(head.inputs[1].node) != _constants(table):
            yield self._product("output", head)
        self._used.add(head.number)
        yield self._norm("output_norm.weight", head.inputs[0])

    def _attention(self, at: str, node: IrNode) -> Iterator[Tensor]:
        found: dict[str, IrNode] = {}
        for what, wire in (("q", node.inputs[0]), ("k", _new_rows(node, 1)), ("v", _new_rows(node, 2))):
            found[what], between = self._projection(wire)
            yield self._product(f"{at}attn_{what}", found[what])
            yield from self._bias(f"{at}attn_{what}.bias", found[what])
            yield from self._head_norm(f"{at}attn_{what}_norm.weight", between)
        if len({product.inputs[0].node.number for product in found.values()}) != 1:
            raise self._refused("queries, keys and values of different rows")
        yield self._norm(f"{at}attn_norm.weight", found["q"].inputs[0])
        out = self._following(node, _MOVES)
        yield self._product(f"{at}attn_output", out)
        yield from self._bias(f"{at}attn_output.bias", out)

    def _feed_forward(self, at: str, silu: IrNode) -> Iterator[Tensor]:
        gate, _ = self._projection(silu.inputs[0])
        both = self._only_user(silu, "Multiply")
        up, _ = self._projection(next(wire for wire in both.inputs if wire.node is not silu))
        if up.inputs[0].node is not gate.inputs[0].node:
            raise self._refused("a gate of other rows than it gates")
        down = self._following(both, frozenset({"Convert"}))
        for what, product in (("gate", gate), ("up", up), ("down", down)):
            yield self._product(f"{at}ffn_{what}", product)
            yield from self._bias(f"{at}ffn_{what}.bias", product)
        yield self._norm(f"{at}ffn_norm.weight", gate.inputs[0])

    def _projection(self, wire: Wire) -> tuple[IrNode, list[IrNode]]:
        """The one product with weights that a value is made from, and the nodes between."""
        between: list[IrNode] = []
        products: dict[int, IrNode] = {}
        waiting, seen = [wire.node], {wire.node.number}
        while waiting:
            node = waiting.pop()
            if node.kind in _ENDS or is_static(node):
                continue
            if node.kind == "MatMul" and is_static(node.inputs[1].node):
                products[node.number] = node
                continue
            between.append(node)
            for source in node.inputs:
                if source.node.number not in seen:
                    seen.add(source.node.number)
                    waiting.append(source.node)
        if len(products) != 1:
            raise self._refused(f"{wire.node.name} is made from {len(products)} products with weights, not from one")
        return next(iter(products.values())), between

    def _following(self, node: IrNode, through: Iterable[str]) -> IrNode:
        """The product with weights that a value goes into."""
        while node.kind != "MatMul":
            if len(node.users) != 1 or not (node.users[0].kind == "MatMul" or node.users[0].kind in through):
                raise self._refused(f"{node.name} goes elsewhere than into a product with weights")
            node = node.users[0]
        return node

    def _only_user(self, node: IrNode, kind: str) -> IrNode:
        users = [user for user in node.users if user.kind == kind]
        if len(node.users) != 1 or not users:
            raise self._refused(f"{node.name} is used by other than one {kind}")
        return users[0]

    def _product(self, name: str, node: IrNode) -> Tensor:
        if not is_static(node.inputs[1].node) or node.data.get("transpose_a") == "true":
            raise self._refused(f"{node.name} is no product of rows with weights")
        self._used.add(node.number)
        return self._matrix(f"{name}.weight", node.inputs[1].node, transposed=node.data.get("transpose_b") != "true")

    def _matrix(self, name: str, node: IrNode, *, transposed: bool) -> Tensor:
        """`transposed`: the graph has the input first."""
        kind, data, n_in = matrix(self._graph, node, transposed=transposed)
        return Tensor(name, kind, data, (n_in, len(data)), int(data.nbytes))

    def _bias(self, name: str, product: IrNode) -> Iterator[Tensor]:
        for user in product.users:
            values = [wire.node for wire in user.inputs if is_static(wire.node)]
            if user.kind == "Add" and values:
                yield _plain(name, vector(self._graph, values[0]))

    def _head_norm(self, name: str, between: list[IrNode]) -> Iterator[Tensor]:
        if not any(node.kind == "ReduceMean" for node in between):
            return
        found = []
        for node in between:
            if node.kind == "Multiply":
                found += [v for v in self._factors(node) if v.size > 1]
        if len(found) > 1:
            raise self._refused("more than one weight in the norm of a head")
        mean = next(node for node in between if node.kind == "ReduceMean")
        width = mean.inputs[0].shape[-1]
        yield _plain(name, found[0] if found else np.ones(width, np.float32))

    def _norm(self, name: str, wire: Wire) -> Tensor:
        """The weight of the RMS norm that ends in a value; ones where the graph has none."""
        weights: list[npt.NDArray[np.float32]] = []
        waiting, is_norm = [wire.node], False
        while waiting:
            node = waiting.pop()
            is_norm = is_norm or node.kind == "Divide" or node.kind == "Power"
            if node.kind in _NORM:
                weights += self._factors(node) if node.kind == "Multiply" else []
                waiting += [source.node for source in node.inputs if not is_static(source.node)]
        scales = [w for w in weights if w.size == 1 and float(w.reshape(())) != 1.0]
        wide = [w for w in weights if w.size > 1]
        if not is_norm or scales or len(wide) > 1:
            raise self._refused(f"{wire.node.name} is no plain RMS norm")
        return _plain(name, wide[0] if wide else np.ones(self._n_embd, np.float32))

    def _factors(self, node: IrNode) -> list[npt.NDArray[np.float32]]:
        return [vector(self._graph, wire.node) for wire in node.inputs if is_static(wire.node)]

    def _refused(self, why: str) -> ModelUnsupported:
        return ModelUnsupported(f"{self._graph.file.parent}: {why}; the reference does not know this graph")


def _plain(name: str, values: npt.NDArray[np.float32]) -> Tensor:
    import gguf

    flat = np.ascontiguousarray(values.reshape(-1), np.float32)
    return Tensor(name, gguf.GGMLQuantizationType.F32, flat, (len(flat),), int(flat.nbytes))


def _new_rows(attention: IrNode, port: int) -> Wire:
    """What is put behind the cache of an attention node's keys (1) or values (2)."""
    node = attention.inputs[port].node
    while node.kind in _REPEATS:
        node = node.inputs[0].node
    if node.kind != "Concat" or len(node.inputs) != 2:
        raise ModelUnsupported(f"{attention.name} does not read a cache; the reference does not know this graph")
    return node.inputs[1]


def _is_lookup(gather: IrNode) -> bool:
    return behind_converts(gather.inputs[1].node).kind == "Parameter"


def _constants(node: IrNode) -> set[int]:
    """The constants that a static value is made from, by where they are in the file."""
    waiting, found = [node], set()
    while waiting:
        one = waiting.pop()
        if one.kind == "Const" and int(one.data.get("size", "0")) > 64:
            found.add(int(one.data.get("offset", "0")))
        waiting += [wire.node for wire in one.inputs]
    return found
