"""A tiny model of a type that continuous batching reads rightly, a prompt, and our own engine on the same file."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvtape.backends.batching.config import BatchingConfig
from kvtape.backends.batching.pipeline import BatchingPipeline
from kvtape.backends.logits import log_softmax
from kvtape.backends.openvino.engine import OpenVinoEngine
from kvtape.backends.protocol import SessionConfig
from support.openvino_tiny import scratch_folder, tokens
from support.tiny_gguf import write_tiny

__all__ = ["N_CTX", "PROMPT", "batching_engine", "batching_model", "own_log_probs", "pipeline"]

N_CTX = 2048
PROMPT = tuple(tokens(300))


@functools.cache
def batching_model() -> Path:
    """Queries and keys are large enough for attention to matter: what is evicted changes what is said."""
    return write_tiny(scratch_folder() / "batching.gguf", weights="f16", n_ctx=N_CTX, qk_gain=2.0)


@functools.cache
def batching_engine() -> OpenVinoEngine:
    return OpenVinoEngine.load(batching_model(), {"scores": "on"})


def pipeline(blocks: int = 64, **config: object) -> BatchingPipeline:
    return BatchingPipeline(batching_model(), BatchingConfig(blocks, **config))  # type: ignore[arg-type]


def own_log_probs(known: Sequence[int], said: Sequence[int], engine: OpenVinoEngine | None = None) -> list[float]:
    """What a session of ours, dense, says of `said` behind `known`, token by token."""
    backend = (engine or batching_engine()).open(SessionConfig(n_ctx=len(known) + len(said), options={"scores": "off"}))
    logits = backend.prefill(list(known), 0).logits
    found = []
    for i, token in enumerate(said):
        found.append(float(log_softmax(np.asarray(logits))[token]))
        logits = backend.prefill([token], len(known) + i).logits
    backend.close()
    return found
