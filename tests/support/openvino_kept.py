"""What the CPU plugin really keeps rows as, asked with raw properties and read off the rows themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtape.backends.openvino.compiled import Profile
from kvtape.backends.openvino.graph import SessionGraph
from kvtape.backends.openvino.graph_source import build_graph
from kvtape.backends.openvino.runner import Runner
from kvtape.backends.openvino.runtime import core
from kvtape.backends.openvino.storage import Storage
from support.openvino_tiny import tiny_path, tiny_session, tokens
from support.processor import computes_bf16

__all__ = ["Kept", "compiled_runner", "keep", "kept_as"]

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Kept:
    """`keys`, `values`: as computed; `stored_keys`, `stored_values`: as the states read after the last call; all
    `[layers, n, kv_heads, head_dim]`. `earlier`: keys of the states after the first call. `answers`: what the compiled
    model says of its own key and value types. `runner` holds the rows still."""

    keys: F32
    values: F32
    stored_keys: F32
    stored_values: F32
    earlier: F32
    answers: tuple[str, str]
    runner: Runner


@cache
def _graph(path: Path) -> SessionGraph:
    return build_graph(path)


def compiled_runner(properties: dict[str, str], model: str = "llama-two-kv-heads") -> tuple[Runner, tuple[str, str]]:
    """A request of a model compiled with exactly these properties, and what it answers about its K and V types.

    Raises RuntimeError where the plugin refuses them.
    """
    graph = _graph(tiny_path(model))
    compiled = core().compile_model(graph.model, "CPU", properties)
    says = [compiled.get_property(name).to_string() for name in ("KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION")]
    return Runner(compiled, graph.shape), (says[0], says[1])


def keep(keys: str, values: str, inference: str = "f32", more: dict[str, str] | None = None) -> Kept:
    """A prefill of 16 tokens, one of 15 and one token alone, on the tiny model.

    Raises UsageError, kvtape's own, for bf16 inference where the processor does not compute in it.
    """
    if inference == "bf16" and not computes_bf16():
        tiny_session("llama-two-kv-heads", kv_type_k="bf16", kv_type_v="bf16", options={"kv": "asked"}).close()
    runner, answers = compiled_runner(Profile(keys, values, 1, inference=inference).properties() | (more or {}))
    ids = np.array(tokens(32))
    steps, earlier = [], np.empty(0, np.float32)
    for start, stop in ((0, 16), (16, 31), (31, 32)):
        steps.append(runner.step(ids[start:stop], np.arange(start, stop), np.arange(start)))
        if not start:
            earlier = np.stack(runner.states().keys)
    states = runner.states()
    return Kept(
        np.concatenate([s.keys for s in steps], axis=1),
        np.concatenate([s.values for s in steps], axis=1),
        np.stack(states.keys),
        np.stack(states.values),
        earlier,
        answers,
        runner,
    )


def kept_as(rows: F32, stored: F32, inference: str) -> str | None:
    """The type that gives every bit of `stored` from `rows`; None when none does."""
    types = ("bf16", "u8") if inference == "bf16" else ("f32", "f16", "u8")
    found = [t for t in types if np.array_equal(Storage(t, inference).stored(rows), stored)]
    return found[0] if len(found) == 1 else None
