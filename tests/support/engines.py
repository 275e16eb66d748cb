"""The engines, and the reference, on tiny models, one thread, f32 storage: how tests open them."""

from __future__ import annotations

import os
from pathlib import Path

from kvtape.backends.protocol import Backend, Engine, SessionConfig
from kvtape.backends.registry import open_engine

__all__ = ["ENGINES", "NATIVE", "f32_config", "load_engine", "open_f32"]

NATIVE = ("llama", "openvino")
ENGINES = (*NATIVE, "reference")
"""The reference is slower: tests of thousands of tokens or of a real model run on `NATIVE`."""


def load_engine(name: str, path: Path) -> Engine:
    """The engine with threads that sleep when they wait: tests share their cores."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return open_engine(name, path, {})


def f32_config(n_ctx: int = 256, chunk: int = 64) -> SessionConfig:
    return SessionConfig(
        n_ctx=n_ctx, chunk=chunk, kv_type_k="f32", kv_type_v="f32", threads=1, cold_budget_tokens=n_ctx
    )


def open_f32(engine: Engine, n_ctx: int = 256) -> Backend:
    return engine.open(f32_config(n_ctx))
