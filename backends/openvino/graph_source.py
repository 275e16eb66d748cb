"""From a model by path to the graph that its sessions run on."""

from __future__ import annotations

from pathlib import Path

from kvtape.backends.openvino.gguf_graph import build_gguf_graph
from kvtape.backends.openvino.graph import SessionGraph
from kvtape.backends.openvino.ir_graph import build_ir_graph

__all__ = ["build_graph"]


def build_graph(path: str | Path, *, queries: bool = False, n_ctx_train: int = 0) -> SessionGraph:
    """From a GGUF, or from the folder of an OpenVINO model, whose attention must reach back `n_ctx_train` tokens.

    `queries` adds the post-RoPE queries as `q_rows` `[layers, heads, T, head_dim]`. Raises UsageError for a model that
    OpenVINO, or this, cannot take; EnvironmentProblem where a graph is not what the GGUF frontend was known to give.
    """
    if Path(path).is_dir():
        return build_ir_graph(path, n_ctx_train, queries=queries)
    return build_gguf_graph(path, queries=queries)
