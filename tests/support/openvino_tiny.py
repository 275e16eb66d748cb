"""Tiny models opened on OpenVINO, one engine a model and process: compiling takes longer than most tests."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvtape.backends.openvino.engine import OpenVinoEngine
from kvtape.backends.openvino.session import OpenVinoBackend
from kvtape.backends.protocol import SessionConfig
from support.tiny_gguf import write_tiny

__all__ = [
    "MODELS",
    "assert_whole",
    "same_rows",
    "scratch_folder",
    "tiny_engine",
    "tiny_path",
    "tiny_session",
    "tokens",
]

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama"},
    "llama-two-kv-heads": {"arch": "llama", "n_embd": 128, "n_head": 4, "n_head_kv": 2},
    "llama-yarn": {"arch": "llama", "yarn": 4},
    "qwen2": {"arch": "qwen2"},
    "qwen3": {"arch": "qwen3"},
}


@functools.cache
def scratch_folder() -> Path:
    """A folder of this process, gone when it ends."""
    folder = tempfile.mkdtemp(prefix="kvtape-tiny-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def tiny_path(name: str) -> Path:
    return write_tiny(scratch_folder() / f"{name}.gguf", **MODELS[name])


@functools.cache
def tiny_engine(name: str) -> OpenVinoEngine:
    return OpenVinoEngine.load(tiny_path(name))


def tiny_session(name: str = "llama", **config: Any) -> OpenVinoBackend:
    """A session with a cold store, in chunks of 16, in a context of 512."""
    return tiny_engine(name).open(SessionConfig(**{"n_ctx": 512, "chunk": 16, "cold_budget_tokens": 256} | config))


def tokens(n: int, seed: int = 0) -> list[int]:
    """Ordinary token ids of the tiny vocabulary."""
    return [int(t) for t in np.random.default_rng(seed).integers(3, 259, n)]


def assert_whole(backend: OpenVinoBackend) -> None:
    """Books, host copy and every layer of the engine tell of the same rows, bit by bit."""
    witness = backend.witness()
    books = [p for s in backend.books() for p in range(s.cache_start, s.cache_stop)]
    assert witness.cache_positions.tolist() == books
    every = [*witness.rows.keys, *witness.rows.values]
    assert [len(rows) for rows in every] == [len(books)] * len(every)
    if witness.mirror is not None:
        for engine, host in zip(every, [*witness.mirror.keys, *witness.mirror.values], strict=True):
            np.testing.assert_array_equal(engine, host)


def same_rows(one: OpenVinoBackend, other: OpenVinoBackend) -> bool:
    """Both engines hold the same bits at the same cache positions."""
    a, b = one.witness(), other.witness()
    pairs: Sequence[tuple[Any, Any]] = [
        (a.cache_positions, b.cache_positions),
        *zip((*a.rows.keys, *a.rows.values), (*b.rows.keys, *b.rows.values), strict=True),
    ]
    return all(np.array_equal(x, y) for x, y in pairs)
