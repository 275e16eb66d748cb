"""The fingerprint of a model file: what must be equal before two files are taken for one model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["FINGERPRINT_PARTS", "FOLDER_PREFIX", "fingerprint", "fingerprint_difference", "has_weights", "of_folder"]

FINGERPRINT_PARTS: Final = ("architecture", "tensor shapes", "tokenizer", "file size", "header", "weights")
"""What the parts, separated by `/`, are taken over. Logs of version 0.1 have the first five."""

FOLDER_PREFIX: Final = "openvino:"
"""Begins the fingerprint of an OpenVINO model directory, which no GGUF of the same weights can share."""

_WINDOW_BYTES: Final = 4096


def fingerprint(file: Path, reader: Any, arch: str) -> str:
    """`arch/tensor shapes/tokenizer/file bytes/header/weights`; each hash SHA-256 cut to 16 hex digits.

    The weights are sampled: 4 KiB from the middle of every tensor (all of a smaller one), in file order. A tensor that
    was trained further differs there with near certainty; a file with a few bytes changed elsewhere may pass.
    """
    header = memoryview(reader.data)[: reader.data_offset]
    shapes = "\n".join(f"{t.name} {t.tensor_type.name} {[int(n) for n in t.shape]}" for t in reader.tensors)
    tokenizer = hashlib.sha256()
    for key in sorted(k for k in reader.fields if k.startswith("tokenizer.")):
        tokenizer.update(key.encode())
        for part in reader.fields[key].parts:
            tokenizer.update(part.tobytes())
    hashes = (hashlib.sha256(shapes.encode()), tokenizer, hashlib.sha256(header), _sample(file, reader.tensors))
    shape_hash, tokenizer_hash, header_hash, weights_hash = (h.hexdigest()[:16] for h in hashes)
    return f"{arch}/{shape_hash}/{tokenizer_hash}/{file.stat().st_size}/{header_hash}/{weights_hash}"


def fingerprint_difference(recorded: str, given: str) -> tuple[str, ...]:
    """Names of the parts that differ, with both values; empty when the files pass for one model.

    A fingerprint without the weights part, from an older log, is compared by what it has.
    """
    parts, others = recorded.split("/"), given.split("/")
    n = len(FINGERPRINT_PARTS)
    if not n - 1 <= len(parts) <= n or len(others) != n:
        return () if recorded == given else ("the form of the fingerprint",)
    pairs = zip(FINGERPRINT_PARTS, parts, others, strict=False)
    return tuple(f"{name} ({a}, given {b})" for name, a, b in pairs if a != b)


def has_weights(recorded: str) -> bool:
    """Does a fingerprint say anything of the weights? Those of older logs do not."""
    return len(recorded.split("/")) != len(FINGERPRINT_PARTS) - 1


def of_folder(recorded: str) -> bool:
    """Is it the fingerprint of an OpenVINO model directory, and not of a GGUF?"""
    return recorded.startswith(FOLDER_PREFIX)


def _sample(file: Path, tensors: Sequence[Any]) -> Any:
    """Read by position, not through the memory map: a page touched there would count as the process's memory."""
    digest = hashlib.sha256()
    descriptor = os.open(file, os.O_RDONLY)
    try:
        for tensor in sorted(tensors, key=lambda t: int(t.data_offset)):
            size = min(_WINDOW_BYTES, int(tensor.n_bytes))
            start = int(tensor.data_offset) + (int(tensor.n_bytes) - size) // 2
            digest.update(os.pread(descriptor, size, start))
    finally:
        os.close(descriptor)
    return digest
