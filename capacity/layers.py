"""From a model's metadata to its KV geometry: what every layer keeps, and what had to be assumed to say so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from kvtape.capacity.errors import ModelFileError
from kvtape.capacity.geometry import KVGeometry, LayerGroup, LayerKind
from kvtape.capacity.metadata import Metadata
from kvtape.capacity.patterns import Windows, windows_of
from kvtape.capacity.recurrent import RECURRENT_ONLY, recurrent_layers, state_elements

__all__ = ["ModelKV", "model_kv"]

_OWN_KV_LAYERS: Final = {"gemma3n": 20}
"""Architectures whose later layers share the KV of earlier ones, whatever the file says."""

_INDEXED: Final = frozenset({"deepseek32", "glm-dsa", "qwen4exp"})
"""Attention layers have a second cache, of indexer keys."""

_MOST_LAYERS: Final = 10_000
"""Several times what any engine takes."""


@dataclass(frozen=True, slots=True)
class ModelKV:
    """`model_max` in tokens, 0 where the model does not say. `weights_bytes` 0 where they are not at hand.

    `notes`: what was assumed (they begin with `assumed:`), and what the file says that the engine passes over.
    """

    arch: str
    model_max: int
    geometry: KVGeometry
    notes: tuple[str, ...] = ()
    weights_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Heads:
    """Sizes of a head of full and of windowed layers, and whether rows are latent."""

    key: int
    value: int
    key_windowed: int
    value_windowed: int
    latent: bool


def model_kv(meta: Metadata, weights_bytes: int = 0) -> ModelKV:
    """Raises ModelFileError, naming the key, for metadata that does not describe a decoder."""
    n_all = meta.integer("block_count")
    # Layers that predict several tokens ahead come last; they have a context of their own.
    n_layers = n_all - meta.integer("nextn_predict_layers", 0)
    if n_layers < 1:
        raise ModelFileError(
            f"{meta.source}: {meta.arch}.block_count is {n_all}, which leaves no layer"
            "; fetch or convert the model again"
        )
    if n_all > _MOST_LAYERS:
        raise ModelFileError(f"{meta.source}: {meta.arch}.block_count is {n_all}; the most is {_MOST_LAYERS}")
    head_count = meta.per_layer("attention.head_count", n_all, 0 if meta.arch in RECURRENT_ONLY else None)
    has_kv_heads = meta.has("attention.head_count_kv")
    kv_heads = (meta.per_layer("attention.head_count_kv", n_all) if has_kv_heads else head_count)[:n_layers]
    windows = windows_of(meta, n_layers)
    states, attention, notes = recurrent_layers(meta, kv_heads)
    heads = _head_sizes(meta, head_count)
    own = _own_kv_layers(meta, n_all)
    layers: list[LayerGroup] = []
    for i in range(n_layers):
        if attention[i] and kv_heads[i]:
            layers.append(_attention_layer(i, kv_heads[i], heads, windows, shared=i >= own))
        if states[i]:
            r, s = state_elements(meta)
            layers.append(LayerGroup(LayerKind.RECURRENT, 1, r, s, type_k="f32", type_v="f32"))
    layers += _indexer(meta, attention)
    return ModelKV(
        arch=meta.arch,
        model_max=meta.integer("context_length", 0),
        geometry=KVGeometry(tuple(_grouped(layers))),
        notes=(*windows.notes, *notes, *_latent_notes(meta, heads)),
        weights_bytes=weights_bytes,
    )


def _head_sizes(meta: Metadata, head_count: tuple[int, ...]) -> _Heads:
    first = head_count[0] if head_count else 0
    has_widths = meta.has("attention.key_length") and meta.has("attention.value_length")
    default = meta.integer("embedding_length", 0 if has_widths else None) // first if first else 0
    key, value = meta.integer("attention.key_length", default), meta.integer("attention.value_length", default)
    absorbed = meta.integer("attention.key_length_mla", 0) and meta.integer("attention.value_length_mla", 0)
    return _Heads(
        key=key,
        value=value,
        key_windowed=meta.integer("attention.key_length_swa", key),
        value_windowed=meta.integer("attention.value_length_swa", value),
        latent=bool(absorbed),
    )


def _attention_layer(i: int, kv_heads: int, heads: _Heads, windows: Windows, *, shared: bool) -> LayerGroup:
    windowed = windows.flags[i]
    key, value = (heads.key_windowed, heads.value_windowed) if windowed else (heads.key, heads.value)
    if shared:
        return LayerGroup(LayerKind.SHARED, 1, kv_heads * key, kv_heads * value, kv_heads)
    if heads.latent:
        return LayerGroup(LayerKind.LATENT, 1, kv_heads * key, 0, kv_heads, copy_elems=kv_heads * value)
    kind = LayerKind.GLOBAL
    if windowed:
        kind = LayerKind.CHUNKED if windows.chunked else LayerKind.WINDOWED
    window = windows.window if windowed else 0
    return LayerGroup(kind, 1, kv_heads * key, kv_heads * value, kv_heads, window)


def _own_kv_layers(meta: Metadata, n_all: int) -> int:
    """The first layers have KV of their own, those from here on share."""
    if meta.arch in _OWN_KV_LAYERS:
        return _OWN_KV_LAYERS[meta.arch]
    own = n_all - meta.integer("attention.shared_kv_layers", 0)
    if own < 1:
        key = f"{meta.arch}.attention.shared_kv_layers"
        raise ModelFileError(
            f"{meta.source}: {key} is {n_all - own}, which leaves no KV of the {n_all} layers"
            "; fetch or convert the model again"
        )
    return own


def _indexer(meta: Metadata, attention: tuple[bool, ...]) -> list[LayerGroup]:
    """Keys of the sparse-attention indexer: one of its own in every attention layer, or where the file's array says the
    type of the first layer. A layer that shares an indexer follows one that has its own, so the first has its own.
    """
    width = meta.integer("attention.indexer.key_length", 0)
    if meta.arch not in _INDEXED or not width:
        return []
    types = meta.get("attention.indexer.types")
    own = [t == types[0] for t in types[: len(attention)]] if isinstance(types, list) and types else attention
    return [LayerGroup(LayerKind.LATENT, sum(own), width, 0, part="indexer")]


def _latent_notes(meta: Metadata, heads: _Heads) -> tuple[str, ...]:
    if heads.latent or not meta.integer("attention.kv_lora_rank", 0):
        return ()
    why = (
        "the file has no absorbed keys (key_length_mla, value_length_mla): the latent is expanded to every head, and "
        "the cache is many times larger than that of a newer conversion"
    )
    return (why,)


def _grouped(layers: Iterable[LayerGroup]) -> list[LayerGroup]:
    """Layers alike become one group, in order of first appearance; full caches before windowed ones, as engines list
    them.
    """
    counts: dict[LayerGroup, int] = {}
    for layer in layers:
        alike = replace(layer, count=1)
        counts[alike] = counts.get(alike, 0) + layer.count
    order = {"full": 0, "latent": 0, "swa": 1, "indexer": 2, "recurrent": 3, "shared": 4}
    groups = [replace(layer, count=count) for layer, count in counts.items()]
    return sorted(groups, key=lambda g: order.get(g.part, 5))
