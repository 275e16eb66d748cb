"""What a session on the reference is opened with, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from kvtape.backends.asked import check_sizes, read_options
from kvtape.backends.errors import UsageError
from kvtape.backends.fit import MEMORY_OPTION, Need, fitted_context, read_memory
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.reference.engines.registry import EngineChoice, parse_engine
from kvtape.backends.reference.model.weights import Weights
from kvtape.planner.specs import Option

__all__ = ["ReferenceOptions", "Resolved", "parse_reference_options", "resolve"]

_OPTIONS: Final = {
    "dtype": Option(str, "float32", ("float32", "float64")),
    "engine": Option(str, "standard"),
    "memory": MEMORY_OPTION,
    "scores": Option(str, "off", ("on", "off")),
    "weights": Option(str, "plain", ("plain", "packed")),
}

_KV_TYPES: Final = {np.dtype(np.float32): "f32", np.dtype(np.float64): "f64"}

_WORK_BYTES: Final = 64 * 2**20
"""Of a forward beside its rows: blocks of scores, activations of a chunk, tiles."""


@dataclass(frozen=True, slots=True)
class ReferenceOptions:
    """`engine`: of the KV engine catalogue; `standard` has rows that surgery can be done on. `dtype`: of weights, rows
    and arithmetic. `packed`: weights stay as the file has them. `scores`: count the attention of every query while
    computing. `memory`: bytes that weights and rows must fit in.
    """

    engine: EngineChoice
    dtype: np.dtype[Any]
    packed: bool
    scores: bool
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Resolved:
    """`config` with effective values, the effective context in tokens, and the options."""

    config: SessionConfig
    n_ctx: int
    options: ReferenceOptions


def parse_reference_options(options: Mapping[str, str]) -> ReferenceOptions:
    """Read engine options. Raises UsageError that names the known keys, values or engines, or two at odds."""
    given = read_options("reference", options, _OPTIONS)
    engine = parse_engine(given["engine"])
    if given["scores"] == "on" and engine.spec != "standard":
        raise UsageError(f"scores=on needs engine=standard; {engine.spec} does not show whom it attends to")
    return ReferenceOptions(
        engine=engine,
        dtype=np.dtype(given["dtype"]),
        packed=given["weights"] == "packed",
        scores=given["scores"] == "on",
        memory=read_memory(given["memory"]),
    )


def resolve(asked: SessionConfig, options: ReferenceOptions, weights: Weights, *, loaded: bool = False) -> Resolved:
    """`loaded`: see `fit.fitted_context`. Raises UsageError for bad sizes, DoesNotFit for lack of memory.

    Rows are stored in the float type of the arithmetic whatever was asked, on one thread, without flash attention: the
    session's `config` says so.
    """
    check_sizes(asked)
    n_ctx = fitted_context(asked.n_ctx, options.memory, _need(weights, scores=options.scores), loaded=loaded)
    kv = _KV_TYPES[options.dtype]
    config = replace(asked, kv_type_k=kv, kv_type_v=kv, flash_attention="off", threads=1)
    return Resolved(config, n_ctx, options)


def _need(weights: Weights, *, scores: bool) -> Need:
    """Rows with their room to grow; sums by head in float64."""
    shape = weights.architecture.shape
    row = shape.n_layer * shape.n_head_kv * (shape.head_dim_k + shape.head_dim_v) * weights.dtype.itemsize
    sums = 8 * shape.n_layer * shape.n_head if scores else 0
    return Need(shape.weights_bytes + weights.float_bytes, lambda n: n * row * 5 // 4, lambda n: _WORK_BYTES + n * sums)
