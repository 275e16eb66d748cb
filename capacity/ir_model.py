"""The shape of an OpenVINO model directory: sizes from the graph, what a graph does not say from its JSON files.

openvino_model.xml .bin          the graph: caches as states, logits as result
openvino_tokenizer.xml .bin      optional; its `eos_token_id` ends a text
config.json                      optional; `max_position_embeddings`, `eos_token_id`, `model_type`
generation_config.json           optional; `eos_token_id`
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtape.capacity.errors import ModelFileError
from kvtape.capacity.fingerprint import FOLDER_PREFIX
from kvtape.capacity.geometry import LayerKind
from kvtape.capacity.ir_files import CONFIG, ir_graph_file, read_settings
from kvtape.capacity.ir_graph import IrGraph, IrNode, Wire, read_ir_graph
from kvtape.capacity.openvino_ir import openvino_model_kv
from kvtape.capacity.shape import ModelShape

__all__ = ["reached", "read_ir_model", "rope_frequencies"]

_WINDOW_BYTES: Final = 4096
_TOKENIZER: Final = "openvino_tokenizer.xml"
_FLOATS: Final = frozenset({"f16", "f32", "f64", "bf16"})
_DEFAULT_EPS: Final = 1e-5


def read_ir_model(folder: Path) -> ModelShape:
    """Raises ModelFileError for a folder without a graph, a damaged one, or one that is no decoder with KV states."""
    file = ir_graph_file(folder)
    kv = openvino_model_kv(folder)
    graph = read_ir_graph(file)
    constants = graph.of_kind("Const")
    for node in constants:
        graph.raw_constant(node)
    heads = _heads(graph, kv.geometry.groups)
    frequencies = rope_frequencies(graph)
    return ModelShape(
        path=str(folder),
        fingerprint=_fingerprint(folder, graph, kv.arch),
        arch=kv.arch,
        n_layer=sum(group.count for group in kv.geometry.groups),
        n_embd=_embedding_width(graph),
        n_head=heads.queries,
        n_head_kv=heads.keys,
        head_dim_k=heads.width_k,
        head_dim_v=heads.width_v,
        n_vocab=_vocabulary(graph),
        n_ctx_train=kv.model_max,
        rms_eps=_epsilon(graph),
        rope_base=_rope_base(read_settings(folder / CONFIG)),
        rope_dims=2 * len(frequencies) or heads.width_k,
        rope_pairs="halves",
        rope_scaling="none",
        sliding_window=0,
        qk_norm=False,
        tensor_types=frozenset(node.data.get("element_type", "") for node in constants),
        tokenizer=_tokenizer_kind(folder),
        end_tokens=_end_tokens(folder),
        geometry=kv.geometry,
        weights_bytes=kv.weights_bytes,
        rope_frequencies=frequencies,
    )


def rope_frequencies(graph: IrGraph) -> tuple[float, ...]:
    """Radians a position of each rotated pair: the one table of floats that every cosine depends on; else empty."""
    tables: dict[int, tuple[float, ...]] = {}
    for cosine in graph.of_kind("Cos"):
        for node in reached(cosine):
            if node.kind == "Const" and node.data.get("element_type") in _FLOATS:
                values = graph.constant(node)
                if values.size > 1:
                    tables[node.number] = tuple(values.astype(np.float64).ravel().tolist())
    found = set(tables.values())
    return found.pop() if len(found) == 1 else ()


def reached(start: IrNode, *, stop: frozenset[str] = frozenset({"ShapeOf"})) -> Iterator[IrNode]:
    """`start` and every node whose value it depends on; of the kinds `stop` only the node itself."""
    seen, waiting = {start.number}, [start]
    while waiting:
        node = waiting.pop()
        yield node
        if node.kind in stop and node is not start:
            continue
        for wire in node.inputs:
            if wire.node.number not in seen:
                seen.add(wire.node.number)
                waiting.append(wire.node)


@dataclass(frozen=True, slots=True)
class _Heads:
    queries: int
    keys: int
    width_k: int
    width_v: int


def _heads(graph: IrGraph, groups: Any) -> _Heads:
    attention = graph.of_kind("ScaledDotProductAttention")
    if not attention:
        raise ModelFileError(
            f"{graph.file}: the graph has no ScaledDotProductAttention; export it anew with "
            "`optimum-cli export openvino --task text-generation-with-past`, and not for paged attention"
        )
    if len(groups) != 1 or groups[0].kind != LayerKind.GLOBAL or groups[0].count != len(attention):
        raise ModelFileError(
            f"{graph.file}: {len(attention)} attention nodes over {sum(g.count for g in groups)} layers of "
            f"{len(groups)} kinds; sessions need one kind, with keys and values in every layer"
        )
    queries = {node.inputs[0].shape for node in attention}
    if len(queries) != 1 or len(shape := queries.pop()) != 4 or shape[1] < 1:
        raise ModelFileError(
            f"{graph.file}: queries are not [batch, heads, tokens, size] with one number of heads"
            "; give a GGUF of the model"
        )
    group = groups[0]
    return _Heads(shape[1], group.heads, group.k_elems // group.heads, group.v_elems // group.heads)


def _logits(graph: IrGraph) -> Wire:
    results = graph.of_kind("Result")
    if len(results) != 1:
        raise ModelFileError(f"{graph.file}: {len(results)} results, but a decoder has one, its logits")
    return results[0].inputs[0]


def _vocabulary(graph: IrGraph) -> int:
    shape = _logits(graph).shape
    if len(shape) != 3 or shape[2] < 1:
        raise ModelFileError(
            f"{graph.file}: its result is {list(shape)}, not logits [batch, tokens, vocabulary]"
            "; give a model that generates text"
        )
    return shape[2]


def _embedding_width(graph: IrGraph) -> int:
    """The last size of the first Gather of a table by the token ids; 0 where there is none."""
    ids = {node.number for node in graph.of_kind("Parameter") if node.name == "input_ids"}
    for node in graph.of_kind("Gather"):
        if len(node.inputs) == 3 and any(n.number in ids for n in reached(node.inputs[1].node)):
            table = node.inputs[0].shape
            if len(table) == 2:
                return table[1]
    return 0


def _rope_base(config: dict[str, Any]) -> float:
    """10000 where nobody says; a wrong one does no harm, because keys are asked how they turn."""
    inner = config.get("rope_parameters")
    base = config.get("rope_theta") or (inner.get("rope_theta") if isinstance(inner, dict) else None)
    return float(base) if isinstance(base, int | float) and base > 0 else 10000.0


def _epsilon(graph: IrGraph) -> float:
    """What the first norm adds to its mean square."""
    for node in graph.of_kind("Add"):
        kinds = [wire.node.kind for wire in node.inputs]
        if "ReduceMean" in kinds and "Const" in kinds:
            values = graph.constant(node.inputs[kinds.index("Const")].node)
            if values.size == 1:
                return float(values.reshape(())[()])
    return _DEFAULT_EPS


def _fingerprint(folder: Path, graph: IrGraph, arch: str) -> str:
    """The parts of `capacity.fingerprint`: constants for tensors, the graph's structure for the header.

    The weights are sampled as there: 4 KiB from the middle of every constant.
    """
    constants = sorted(graph.of_kind("Const"), key=lambda node: int(node.data.get("offset", "0")))
    shapes = "\n".join(f"{n.data.get('element_type')} {n.data.get('shape')}" for n in constants)
    weights = hashlib.sha256()
    for node in constants:
        raw = graph.raw_constant(node)
        size = min(_WINDOW_BYTES, len(raw))
        weights.update(raw[(len(raw) - size) // 2 :][:size])
    hashes = (
        hashlib.sha256(shapes.encode()).hexdigest(),
        _tokenizer_digest(folder),
        graph.structure(),
        weights.hexdigest(),
    )
    shape_hash, tokenizer_hash, structure_hash, weights_hash = (h[:16] for h in hashes)
    size = graph.weights_file.stat().st_size
    first = FOLDER_PREFIX + arch.replace("/", "_")
    return f"{first}/{shape_hash}/{tokenizer_hash}/{size}/{structure_hash}/{weights_hash}"


def _tokenizer_digest(folder: Path) -> str:
    file = folder / _TOKENIZER
    digest = hashlib.sha256()
    if file.is_file():
        tokenizer = read_ir_graph(file)
        digest.update(tokenizer.structure().encode())
        if tokenizer.weights_file.is_file():
            digest.update(tokenizer.weights_file.read_bytes())
    return digest.hexdigest()


def _tokenizer_kind(folder: Path) -> str:
    """`gpt2` for byte-level BPE on words that a pattern cuts out first, `none` without a tokenizer, else `unknown`.

    Where texts are rewritten before (a space to a mark, one put in front), a text cut in two gives other ids.
    """
    file = folder / _TOKENIZER
    if not file.is_file():
        return "none"
    kinds = [node.kind for node in read_ir_graph(file).nodes]
    on_words = kinds.count("BPETokenizer") == 1 and "RegexSplit" in kinds
    return "gpt2" if on_words and "RegexNormalization" not in kinds else "unknown"


def _end_tokens(folder: Path) -> frozenset[int]:
    found: list[Any] = []
    file = folder / _TOKENIZER
    if file.is_file():
        found += read_ir_graph(file).settings.get("eos_token_id", "").replace(",", " ").split()
    for name in ("generation_config.json", CONFIG):
        ids = read_settings(folder / name).get("eos_token_id")
        found += ids if isinstance(ids, list) else [ids]
    return frozenset(int(n) for n in found if n is not None and str(n).lstrip("-").isdigit() and int(n) >= 0)
