"""Tiny llama.cpp sessions for tests, and what two of them are compared by."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtape.backends.llama.engine import LlamaEngine
from kvtape.backends.llama.session import LlamaBackend
from kvtape.backends.protocol import Computed, SessionConfig
from support.tiny_gguf import write_tiny

__all__ = ["Image", "image", "model_file", "prefilled", "rotate", "session", "tokens"]

Image = tuple[Any, bytes, tuple[bytes, ...], tuple[bytes, ...]]

_folder = tempfile.TemporaryDirectory(prefix="kvtape-tiny-")


@functools.cache
def model_file(arch: str = "llama", **shape: Any) -> Path:
    """A tiny model, written once per process."""
    name = "-".join([arch, *(f"{k}{v}" for k, v in sorted(shape.items()))])
    return write_tiny(Path(_folder.name) / f"{name}.gguf", arch, **shape)


@functools.cache
def engine(arch: str = "llama", **shape: Any) -> LlamaEngine:
    return LlamaEngine.load(model_file(arch, **shape))


def session(arch: str = "llama", *, config: dict[str, Any] | None = None, **shape: Any) -> LlamaBackend:
    """A session with f32 rows and a cold budget unless `config` says otherwise."""
    asked: dict[str, Any] = {"n_ctx": 512, "kv_type_k": "f32", "kv_type_v": "f32", "cold_budget_tokens": 1000}
    return engine(arch, **shape).open(SessionConfig(**{**asked, **(config or {})}))


def tokens(n: int, seed: int = 0) -> list[int]:
    """Byte tokens, seeded; none is special."""
    return [int(t) for t in np.random.default_rng(seed).integers(3, 259, n)]


def prefilled(n: int, arch: str = "llama", **kwargs: Any) -> tuple[LlamaBackend, Computed]:
    """A session that holds `tokens(n)` and what its prefill computed."""
    backend = session(arch, **kwargs)
    return backend, backend.prefill(tokens(n), 0)


def image(backend: LlamaBackend) -> Image:
    """Books, and every row of the engine's memory in position order, to the bit."""
    seen = backend.witness()
    order = np.argsort(seen.cache_positions)
    keys = tuple(k[order].tobytes() for k in seen.rows.keys)
    values = tuple(v[order].tobytes() for v in seen.rows.values)
    return backend.books(), seen.cache_positions[order].tobytes(), keys, values


def rotate(
    rows: npt.NDArray[Any],
    delta: int | npt.NDArray[np.int64],
    *,
    head_dim: int,
    interleaved: bool,
    base: float = 10000.0,
) -> npt.NDArray[np.float64]:
    """Keys `[n, heads * head_dim]` as RoPE would have them `delta` positions later (one, or one a row)."""
    heads = rows.astype(np.float64).reshape(len(rows), -1, head_dim)
    angle = np.reshape(delta, (-1, 1, 1)) * base ** (-np.arange(0, head_dim, 2) / head_dim)
    half = head_dim // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    out = np.empty_like(heads)
    out[..., first] = heads[..., first] * np.cos(angle) - heads[..., second] * np.sin(angle)
    out[..., second] = heads[..., first] * np.sin(angle) + heads[..., second] * np.cos(angle)
    return out.reshape(len(rows), -1)
