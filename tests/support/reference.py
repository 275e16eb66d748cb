"""Tiny models on the NumPy reference, and plays of its engines."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtape.backends.reference.engines.engine import KvEngine
from kvtape.backends.reference.engines.registry import make_engine, parse_engine
from kvtape.backends.reference.errors import BackendFailure
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.dispatch import logits_of
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.weights import Weights
from support.llama_tiny import model_file

__all__ = ["SHAPES", "FailingFfn", "Play", "kv_engine", "play", "text", "weights"]

SHAPES: dict[str, dict[str, Any]] = {
    "gemma2": {"arch": "gemma2"},
    "gemma3": {"arch": "gemma3"},
    "llama": {"arch": "llama", "n_head": 4, "n_head_kv": 2, "head_dim": 32},
    "mixtral": {"arch": "llama", "n_expert": 5},
    "qwen2": {"arch": "qwen2"},
    "qwen2moe": {"arch": "qwen2moe"},
    "qwen3": {"arch": "qwen3"},
    "qwen3moe": {"arch": "qwen3moe"},
    "yarn": {"arch": "llama", "yarn": 4},
}


@functools.cache
def weights(shape: str = "llama", dtype: str = "float32", *, packed: bool = False, storage: str = "f32") -> Weights:
    """A tiny model of `SHAPES`, opened once per process and way."""
    return Weights(model_file(**SHAPES[shape], weights=storage), np.dtype(dtype), packed=packed)


def text(n: int, seed: int = 0) -> list[int]:
    """Byte tokens and merges, seeded; none is special."""
    return [int(t) for t in np.random.default_rng(seed).integers(3, 300, n)]


def kv_engine(spec: str) -> KvEngine:
    engine = make_engine(parse_engine(spec))
    assert isinstance(engine, KvEngine)
    return engine


@dataclass(frozen=True)
class Play:
    """`hidden` `[1 + n, n_embd]`: after the prompt and after each greedy token."""

    tokens: list[int]
    hidden: Floats
    engine: KvEngine


def play(spec: str, model: Weights, prompt: list[int], n: int) -> Play:
    """Prefill and `n` greedy steps."""
    engine, local = kv_engine(spec), LocalFfn(model)
    hidden = [engine.prefill(model, local, prompt)]
    tokens: list[int] = []
    for _ in range(n):
        tokens.append(int(logits_of(model, hidden[-1])[0].argmax()))
        hidden.append(engine.decode_step(model, local, tokens[-1]))
    return Play(tokens, np.concatenate(hidden), engine)


class FailingFfn:
    """Local layers, of which one fails as often as it is told to."""

    name = "failing"

    def __init__(self, model: Weights, layer: int, times: int = 1) -> None:
        self._local, self._layer, self._times = LocalFfn(model), layer, times

    def feed(self, layer: int, h: Floats) -> Floats:
        if layer == self._layer and self._times:
            self._times -= 1
            raise BackendFailure(f"layer {layer} failed as planned")
        return self._local.feed(layer, h)
