"""A model by path, whatever holds it: a GGUF, a folder with an OpenVINO model, a JSON map of GGUF keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvtape.capacity.errors import ModelFileError
from kvtape.capacity.layers import ModelKV, model_kv
from kvtape.capacity.metadata import Metadata, metadata_from_gguf, metadata_from_json
from kvtape.capacity.openvino_ir import openvino_model_kv

__all__ = ["read_metadata_kv", "read_model_kv", "weights_of_all_parts"]


def read_model_kv(path: str | Path) -> ModelKV:
    """Layers, trained context and weights of a GGUF or of an OpenVINO model's folder. Raises ModelFileError."""
    file = Path(path)
    if file.is_dir():
        return openvino_model_kv(file)
    meta, weights = metadata_from_gguf(file)
    return replace(model_kv(meta), weights_bytes=weights_of_all_parts(file, meta, weights))


def read_metadata_kv(path: str | Path) -> ModelKV:
    """The same of a JSON map of GGUF keys, which says nothing of weights. Raises ModelFileError."""
    return model_kv(metadata_from_json(path))


def weights_of_all_parts(file: Path, meta: Metadata, weights: int) -> int:
    """Bytes of the weights of a model in several files, of which `file` is one. Raises ModelFileError for a gap."""
    count = meta.values.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return weights
    name, _, last = file.stem.rpartition("-of-")
    stem = name.rpartition("-")[0]
    if not stem or not last.isdigit():
        raise ModelFileError(f"{file}: one of {count} parts, whose name does not end in -00001-of-{count:05d}.gguf")
    total = 0
    for number in range(1, count + 1):
        part = file.with_name(f"{stem}-{number:05d}-of-{last}{file.suffix}")
        total += weights if part == file else metadata_from_gguf(part)[1]
    return total
