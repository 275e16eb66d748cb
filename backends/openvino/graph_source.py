"""From a model by path to the graph that its sessions run on."""

from __future__ import annotations

from pathlib import Path

from kvtape.backends.openvino.gguf_graph import build_gguf_graph
from kvtape.backends.openvino.graph import SessionGraph

__all__ = ["build_graph"]


def build_graph(path: str | Path, *, queries: bool = False) -> SessionGraph:
    """`queries` adds the post-RoPE queries as `q_rows` `[layers, heads, T, head_dim]`.

    Raises UsageError for a model that OpenVINO, or this, cannot take; EnvironmentProblem where a graph is not what the
    GGUF frontend was known to give.
    """
    return build_gguf_graph(path, queries=queries)
